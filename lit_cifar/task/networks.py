"""The network of a run: one of this package by name, or the user's own."""

from torch import nn

from lit_cifar.checkpoint.format import Header
from lit_cifar.errors import ConfigError
from lit_cifar.models import DEFAULT_ARCH, Arch, Stem, build_network, stem_of


def choose_network(
    arch: Arch | None,
    *,
    stem: Stem | None,
    zero_init_residual: bool,
    network: nn.Module | None,
    num_classes: int,
    image_size: int,
) -> tuple[nn.Module, Header]:
    """The network, which is `network` if there is one, and the header by which checkpoints know it."""
    if network is None:
        arch = arch or DEFAULT_ARCH
        stem = stem_of(arch, stem)
        sizes = {"num_classes": num_classes, "image_size": image_size}
        built = build_network(arch, stem=stem, zero_init_residual=zero_init_residual, **sizes)
        return built, Header(arch=arch, stem=stem, num_classes=num_classes, image_size=image_size)
    own = f"{type(network).__module__}.{type(network).__qualname__}"
    for name, value in {"arch": arch, "stem": stem, "zero_init_residual": zero_init_residual or None}.items():
        if value is not None:
            problem = f"--model.network={own} is a network, and --model.{name}={value} is about another one"
            raise ConfigError(problem, remedy="leave one of the two out")
    return network, Header(arch=None, stem=None, num_classes=num_classes, image_size=image_size, network=own)
