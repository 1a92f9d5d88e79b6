"""Single-device networks, each in a file of its own. They know nothing of data sets or of parallelism.

`blocks` says what a mode may ask of them.
"""

from typing import Literal, cast

from torch import nn

from lit_cifar.errors import ConfigError
from lit_cifar.models import resnet, vit
from lit_cifar.models.fast import FastNetwork, Whitening
from lit_cifar.models.resnet import Stem, build_resnet

Arch = Literal[resnet.Arch, vit.Arch, "fast"]
DEFAULT_ARCH: Arch = "resnet34"

__all__ = ["DEFAULT_ARCH", "Arch", "Stem", "Whitening", "build_network", "build_resnet", "stem_of"]


def build_network(
    arch: Arch, *, stem: Stem | None, num_classes: int, image_size: int, zero_init_residual: bool = False
) -> nn.Module:
    """The network called `arch`, from float (n, 3, image_size, image_size) to logits (n, num_classes)."""
    if zero_init_residual and arch not in resnet.SHAPES:
        raise ConfigError(f"--model.zero_init_residual=true is of a ResNet, and {arch} is none", remedy="leave it out")
    if arch == "fast":
        return FastNetwork(num_classes=num_classes)
    if arch in vit.SHAPES:
        return vit.VisionTransformer(cast(vit.Arch, arch), num_classes=num_classes, image_size=image_size)
    name = cast(resnet.Arch, arch)
    return build_resnet(name, stem=stem or "cifar", num_classes=num_classes, zero_init_residual=zero_init_residual)


def stem_of(arch: Arch, stem: Stem | None) -> Stem | None:
    """The stem of a network by name, None of one that is no ResNet."""
    if arch in resnet.SHAPES:
        return stem or "cifar"
    if stem is not None:
        raise ConfigError(f"--model.stem={stem} is of a ResNet, and {arch} is none", remedy="leave it out")
    return None
