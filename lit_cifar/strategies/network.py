"""What a strategy that changes how the network runs asks of a LightningModule."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Protocol, cast

from torch import Tensor, nn

from lit_cifar.errors import ConfigError
from lit_cifar.models.blocks import blocks_of

Runner = Callable[[Tensor], Tensor]


class RunsNetwork(Protocol):
    """The plain network, the shape of an image that enters it, and a way to run it differently."""

    network: nn.Module
    image_shape: tuple[int, ...]

    def use_runner(self, runner: Runner | None) -> None:
        """From now on `forward` calls `runner` in place of `network`; None restores `network`."""


class ComputesLoss(RunsNetwork, Protocol):
    """Also the loss, for strategies that run backward themselves."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample, (n,), from `logits` (n, C) and `labels` (n,)."""


def runs_network(module: object) -> bool:
    """Whether `module` offers what `RunsNetwork` asks for."""
    # Not isinstance of a runtime protocol: from Python 3.12 on that does not see the children of an nn.Module.
    return all(hasattr(module, name) for name in ("network", "use_runner"))


def compiles(module: object) -> bool:
    """Whether `module` wants its network compiled."""
    return bool(getattr(module, "compiles", False))


def as_runs_network(module: object, *, strategy: str) -> RunsNetwork:
    """`module`; raises a `ConfigError` if it lacks what `RunsNetwork` asks for."""
    if not runs_network(module):
        raise ConfigError(
            f"--trainer.strategy={strategy} runs a module's `network` in its own way, through `use_runner`; "
            f"{type(module).__name__} has no such pair.",
            remedy="Use lit_cifar.module.LitResNet, or --trainer.strategy=ddp for any LightningModule.",
        )
    return cast(RunsNetwork, module)


def as_computes_loss(module: object, *, strategy: str) -> ComputesLoss:
    """`module`; raises a `ConfigError` if it lacks what `ComputesLoss` asks for."""
    network = as_runs_network(module, strategy=strategy)
    if not hasattr(network, "loss"):
        raise ConfigError(
            f"--trainer.strategy={strategy} asks a module for the `loss` of each sample; "
            f"{type(module).__name__} has none.",
            remedy="Use lit_cifar.module.LitResNet, or --trainer.strategy=ddp for any LightningModule.",
        )
    return cast(ComputesLoss, network)


def check_chain(network: nn.Module, *, strategy: str) -> None:
    """Raise a `ConfigError` unless `network` says its blocks, between which it can be cut."""
    if blocks_of(network) is None:
        raise ConfigError(
            f"--trainer.strategy={strategy} cuts a network between its blocks, and {type(network).__name__} does not "
            "say which it has.",
            remedy="Make it an nn.Sequential, or give it a method blocks() that returns them by name (see\n"
            "lit_cifar.models.blocks); or use --trainer.strategy=ddp, which takes any network.",
        )


def check_untied(network: nn.Module, divided: Iterable[nn.Module], *, strategy: str, recurse: bool = True) -> None:
    """Raise a `ConfigError` if two of the modules into which `network` is divided have a parameter or buffer in common.

    Without `recurse` only the tensors of the modules themselves count, not those of modules in them.
    """
    seen: set[Tensor] = set()
    for module in divided:
        own = {*module.parameters(recurse), *module.buffers(recurse)}
        if shared := own & seen:
            known = [network.named_parameters("", True, False), network.named_buffers("", True, False)]
            named = [(name, tensor) for name, tensor in chain(*known) if tensor in shared]
            names = " = ".join(name for name, tensor in named if tensor is named[0][1])
            raise ConfigError(
                f"{names} is needed in two places, between which --trainer.strategy={strategy} divides the network",
                remedy="pass --trainer.strategy=ddp, which takes any network",
            )
        seen |= own


def check_gradient_hooks(network: nn.Module, *, strategy: str, also_accumulated: bool = True) -> None:
    """Raise a `ConfigError` if a parameter has a hook on its gradient, or, if asked for, on the accumulated one."""
    kinds = ["_backward_hooks", *["_post_accumulate_grad_hooks"] * also_accumulated]  # torch has no other access
    for name, parameter in network.named_parameters():
        if any(getattr(parameter, kind, None) for kind in kinds):
            raise ConfigError(
                f"{name} has a hook on its gradient, which --trainer.strategy={strategy} would not call once, with the "
                "whole gradient",
                remedy="leave out the hook, or pass --trainer.strategy=ddp",
            )
