"""Networks as users write them, for `--model.network`."""

from typing import ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint
from torchmetrics import SumMetric
from torchvision.ops import stochastic_depth

from lit_cifar.models.blocks import SplitKind


class Chain(nn.Sequential):
    """Says its blocks by itself."""

    def __init__(self, width: int = 8, num_classes: int = 2) -> None:
        super().__init__(
            nn.Conv2d(3, width, kernel_size=3, stride=2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Widening(width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, num_classes),
        )


class Widening(nn.Module):
    """A block that `tp` can split."""

    tensor_split: ClassVar[dict[str, SplitKind]] = {"up": "columns", "norm": "channels", "down": "rows"}
    tensor_split["deep"] = "channels"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Conv2d(width, 2 * width, kernel_size=1)
        self.norm = nn.BatchNorm2d(2 * width)
        self.deep = nn.Conv2d(2 * width, 2 * width, kernel_size=1, groups=2 * width)
        self.down = nn.Conv2d(2 * width, width, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.deep(self.norm(self.up(x)).relu()))


class Opaque(nn.Module):
    """Says nothing of itself."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(3, 4, kernel_size=3, stride=4), nn.BatchNorm2d(4)])
        self.head = nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.relu().mean(dim=(2, 3)))


class Forgetful(nn.Module):
    """Leaves the dropout of a training out of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, kernel_size=3, stride=4), nn.Linear(4, 2)

    def blocks(self) -> dict[str, nn.Module]:
        return {"stem": self.stem, "head": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), self.head)}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(dropout(self.stem(x), 0.9, self.training).mean(dim=(2, 3)))


class Odd(nn.Module):
    """One tensor under two names, and a buffer that is not saved, as timm's networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 10)
        self.back.weight = self.there.weight
        self.register_buffer("scale", torch.tensor(0.3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)
        return self.head(self.back(self.there(rows).relu()) * self.scale)


class Wrapped(nn.Module):
    """Has its layers in an attribute of the name that LitResNet gives to the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Odd()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


class Lazy(nn.Sequential):
    """Has a layer whose size its first images decide."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, kernel_size=3, stride=4), nn.Flatten(), nn.LazyLinear(2))


class Unreached(Chain):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self[0].unused = nn.Linear(3, 3)


class Drawing(nn.Sequential):
    """A chain whose layers draw random numbers in each way that torch has, before and behind the middle."""

    def __init__(self, num_classes: int = 10) -> None:
        twice = nn.Dropout(0.2)
        super().__init__(
            nn.Conv2d(3, 8, kernel_size=3, stride=4),
            twice,
            Noise(),
            nn.Conv2d(8, 8, kernel_size=3),
            Noise(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            twice,
            nn.Linear(8, num_classes),
        )


class Checkpointed(Drawing):
    """Computes its layers once more in backward."""

    def blocks(self) -> dict[str, nn.Module]:
        return {str(place): layer for place, layer in enumerate(self)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return x


class Routed(nn.Module):
    """Its images decide which of two layers it uses."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.bright, self.dark = (nn.Linear(3, num_classes) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        layer = self.bright if x.sum() > 0 else self.dark
        return layer(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


class Noise(nn.Module):
    """Draws by functions."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return stochastic_depth(dropout(x, 0.2) + 0.1 * torch.rand_like(x), 0.2, "row")


class Tied(nn.Sequential):
    """Two layers of one weight, the first of which is in the first of two stages."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(3, 3, kernel_size=1, bias=False) for _ in range(2)]
        layers[1].weight = layers[0].weight
        super().__init__(
            layers[0],
            nn.ReLU(),
            nn.Conv2d(3, 3, kernel_size=3),
            layers[1],
            Widening(3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(3, 2),
        )


class Whole(nn.Module):
    """A chain that does not say that it is one."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class DrawingWhole(Whole):
    def __init__(self) -> None:
        super().__init__(Drawing())


class Counting(DrawingWhole):
    """What it answers depends on a sum in float64 over all of its training, which nothing resets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SumMetric().set_dtype(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.update(len(x) / 3)
        return super().forward(x) * (1 + self.seen.sum_value.sin().to(x.dtype))


class TiedWhole(Whole):
    def __init__(self) -> None:
        super().__init__(Tied())


class Hooked(Chain):
    """Halves the gradient of its last weight: as soon as there is one, or when all is added."""

    def __init__(self, *, accumulated: bool = False) -> None:
        super().__init__()
        weight = self[6].weight
        if accumulated:
            weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
        else:
            weight.register_hook(lambda gradient: gradient * 0.5)


class HookAtStart(Callback):
    """Adds such a hook when the modes have made what they train."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.network[6].weight.register_hook(lambda gradient: gradient * 0.5)


class Viewed(nn.Module):
    """Flattens in a way that takes no empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, kernel_size=3, stride=16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x.view(x.size(0), -1))


class LayerScale(nn.Module):
    """A block with a parameter beside its layers; notes the types in which it computes with it."""

    seen: ClassVar[list[torch.dtype]] = []

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.gamma = nn.Conv2d(width, width, kernel_size=1), nn.Parameter(torch.ones(1, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.gamma.dtype)
        return x + self.gamma * self.layer(x)


class Standardised(nn.Conv2d):
    """Computes with its weights beside the convolution, in types that `LayerScale.seen` notes."""

    def forward(self, x: Tensor) -> Tensor:
        LayerScale.seen.append(self.weight.dtype)
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class Skipping(nn.Sequential):
    """Leaves out a block in half of the steps, which nobody else does at the same time."""

    def __init__(self) -> None:
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        super().__init__(nn.Conv2d(3, 4, kernel_size=3, stride=4), Sometimes(), *head)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return x
        return x + self.layer(x)
