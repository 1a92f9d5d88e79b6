"""Small networks as users write them, for `replay_clean.py`: each has something that a mode could stumble over.

Each is a chain of blocks for images of any size, with layers that `tp` can split.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.models.blocks import SplitKind
from lit_cifar.models.vit import VisionTransformer


class Block(nn.Module):
    """A bottleneck of two convolutions with bias beside a shortcut; `norm` is what stands before them."""

    tensor_split: ClassVar[dict[str, SplitKind]] = {"up": "columns", "down": "rows"}

    def __init__(self, width: int, *, hidden: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or nn.Identity()
        self.up = nn.Conv2d(width, hidden, kernel_size=3, padding=1)
        self.down = nn.Conv2d(hidden, width, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Head(nn.Module):
    """Logits from the mean over the picture."""

    tensor_split: ClassVar[dict[str, SplitKind]] = {"fc": "head"}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class Plain(nn.Sequential):
    """Without any normalisation."""

    def __init__(self, *blocks: nn.Module, width: int = 8) -> None:
        own = blocks or (Block(width, hidden=4), Block(width, hidden=12))
        super().__init__(nn.Conv2d(3, width, kernel_size=5, stride=4, padding=2), *own, Head(width))


class Grouped(Plain):
    """GroupNorm, which no batch changes."""

    def __init__(self) -> None:
        super().__init__(*(Block(8, hidden=8, norm=nn.GroupNorm(2, 8)) for _ in range(3)))


class Normalised(Plain):
    """BatchNorm in front of the convolutions."""

    def __init__(self) -> None:
        super().__init__(*(Block(8, hidden=16, norm=nn.BatchNorm2d(8)) for _ in range(2)))


class Blur(nn.Module):
    """A fixed filter, which is no part of a checkpoint."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("filter", torch.full((width, 1, 3, 3), 1 / 9), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filter.to(x.dtype), padding=1, groups=len(self.filter))


class Blurred(Plain):
    """A buffer that is not saved, as timm's networks have."""

    def __init__(self) -> None:
        super().__init__(Blur(8), Block(8, hidden=8, norm=nn.BatchNorm2d(8)))


class Counted(Plain):
    """A whole number that is saved, and that nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self[1].register_buffer("version", torch.tensor(3))


class Dropped(Plain):
    """Draws random numbers in training."""

    def __init__(self, probability: float = 0.2) -> None:
        super().__init__(Block(8, hidden=8), nn.Dropout(probability), Block(8, hidden=8))


class Frozen(Plain):
    """The first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self[0].requires_grad_(False)


class Depthwise(Plain):
    """Each channel is filtered by itself, then all are mixed."""

    def __init__(self, width: int = 12) -> None:
        apart = nn.Conv2d(width, width, kernel_size=3, padding=1, groups=width)
        super().__init__(apart, nn.BatchNorm2d(width), Block(width, hidden=24), width=width)


class Narrow(Plain):
    """Everything passes a single channel."""

    def __init__(self) -> None:
        neck = nn.Sequential(nn.Conv2d(8, 1, kernel_size=1), nn.Tanh(), nn.Conv2d(1, 8, kernel_size=1))
        super().__init__(neck, Block(8, hidden=4))


class TiedBlock(nn.Module):
    """The second layer has the weights of the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.there = nn.Linear(width, width)
        self.back = nn.Linear(width, width)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1)
        out: Tensor = x + self.back(self.there(rows).tanh()).permute(0, 3, 1, 2)
        return out


class Tied(Plain):
    """One tensor under two names, inside a block."""

    def __init__(self) -> None:
        super().__init__(TiedBlock(8), Block(8, hidden=8))


class Attentive(VisionTransformer):
    """Attention and LayerNorm."""

    def __init__(self) -> None:
        super().__init__("vit_micro", num_classes=10, image_size=32)
