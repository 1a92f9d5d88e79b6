"""Single-device networks, each in a file of its own; `blocks` says what a mode may ask of them."""

from typing import Literal

from torch import nn

from lit_cifar.errors import ConfigError, bounded
from lit_cifar.models import resnet
from lit_cifar.models.resnet import Stem, build_resnet
from lit_cifar.models.whitening import Whitening

Arch = Literal[resnet.Arch, "vit_micro", "vit_tiny", "fast"]
DEFAULT_ARCH: Arch = "resnet34"

__all__ = ["DEFAULT_ARCH", "Arch", "Stem", "Whitening", "build_network", "build_resnet", "stem_of"]


def build_network(
    arch: Arch, *, stem: Stem | None, num_classes: int, image_size: int, zero_init_residual: bool = False
) -> nn.Module:
    """The network called `arch`, from float (n, 3, image_size, image_size) to logits (n, num_classes)."""
    if zero_init_residual and arch not in resnet.SHAPES:
        raise ConfigError(f"--model.zero_init_residual=true is of a ResNet, and {arch} is none", remedy="leave it out")
    if arch == "fast":
        from lit_cifar.models.fast import FastNetwork

        bounded("--data.image_size", image_size, 9)
        return FastNetwork(num_classes=num_classes)
    if arch == "vit_micro" or arch == "vit_tiny":
        from lit_cifar.models.vit import VisionTransformer

        return VisionTransformer(arch, num_classes=num_classes, image_size=image_size)
    return build_resnet(arch, stem=stem or "cifar", num_classes=num_classes, zero_init_residual=zero_init_residual)


def stem_of(arch: Arch, stem: Stem | None) -> Stem | None:
    """The stem of a network by name, None of one that is no ResNet."""
    if arch in resnet.SHAPES:
        return stem or "cifar"
    if stem is not None:
        raise ConfigError(f"--model.stem={stem} is of a ResNet, and {arch} is none", remedy="leave it out")
    return None
