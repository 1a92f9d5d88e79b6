"""A small Vision Transformer: a chain of encoder blocks over patches of the image.

Dosovitskiy et al. 2021, "An image is worth 16x16 words" (https://arxiv.org/abs/2010.11929), with the mean over all
patches in place of a class token (Beyer et al. 2022, https://arxiv.org/abs/2205.01580). There is no dropout.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.errors import ConfigError
from lit_cifar.models.blocks import SplitKind

Arch = Literal["vit_micro", "vit_tiny"]


@dataclass(frozen=True)
class _Shape:
    dim: int  # values of a patch between two blocks
    num_blocks: int  # encoder blocks
    num_heads: int  # a divisor of `dim`; `tp` divides them among processes
    patch: int = 4  # height and width of a patch, in pixels


# "vit_tiny" has the width of DeiT-Ti (Touvron et al. 2021) and half its depth, with 12 heads, which 2, 3 and 4 divide.
SHAPES: dict[str, _Shape] = {
    "vit_micro": _Shape(dim=32, num_blocks=2, num_heads=4, patch=8),
    "vit_tiny": _Shape(dim=192, num_blocks=6, num_heads=12),
}


class VisionTransformer(nn.Sequential):
    """Maps float images (n, 3, image_size, image_size) to logits (n, num_classes)."""

    def __init__(self, arch: Arch, *, num_classes: int, image_size: int) -> None:
        shape = SHAPES[arch]
        if image_size % shape.patch:
            problem = f"--model.arch={arch}: patches of {shape.patch} pixels do not fill images of {image_size}"
            nearest = max(1, image_size // shape.patch) * shape.patch
            raise ConfigError(problem, remedy=f"pass --data.image_size={nearest}")
        chain: OrderedDict[str, nn.Module] = OrderedDict()
        chain["patches"] = nn.Conv2d(3, shape.dim, kernel_size=shape.patch, stride=shape.patch)
        chain["position"] = PositionEmbedding(shape.dim, num_patches=(image_size // shape.patch) ** 2)
        for index in range(shape.num_blocks):
            chain[f"block{index}"] = EncoderBlock(shape.dim, num_heads=shape.num_heads)
        chain["head"] = Head(shape.dim, num_classes=num_classes)
        super().__init__(chain)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)


class PositionEmbedding(nn.Module):
    """Adds a learned vector for each place to its patch: (n, dim, rows, columns) to (n, rows x columns, dim)."""

    def __init__(self, dim: int, *, num_patches: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(num_patches, dim).normal_(std=0.02))

    def forward(self, patches: Tensor) -> Tensor:
        return patches.flatten(2).transpose(1, 2) + self.embedding


class EncoderBlock(nn.Module):
    """Attention, then an MLP, each behind a LayerNorm and beside a shortcut: (n, patches, dim) to the same.

    `tp` splits it as Megatron does (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): heads, and hidden values.
    """

    tensor_split: ClassVar[dict[str, SplitKind]] = {
        "attention.qkv": "columns",
        "attention.projection": "rows",
        "mlp.widen": "columns",
        "mlp.narrow": "rows",
    }

    def __init__(self, dim: int, *, num_heads: int) -> None:
        super().__init__()
        self.tensor_parts = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads=num_heads)
        layers = {"widen": nn.Linear(dim, 4 * dim), "gelu": nn.GELU(), "narrow": nn.Linear(4 * dim, dim)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Attention(nn.Module):
    """Self-attention of several heads (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    The outputs of `qkv` are those of the first head, then those of the second, so that `tp` can split between heads.
    """

    def __init__(self, dim: int, *, num_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (-1, 3, self.head_dim))  # (n, patches, heads, 3, head_dim)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return out


class Head(nn.Module):
    """Logits from the mean over the patches."""

    tensor_split: ClassVar[dict[str, SplitKind]] = {"classifier": "head"}

    def __init__(self, dim: int, *, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.norm(x).mean(dim=1))
        return logits
