"""Parts of a network that a training leaves as they are, and the classifier, which may learn faster."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.optim import Optimizer

from lit_cifar import internals
from lit_cifar.errors import ConfigError, bounded


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """What a training starts from, leaves as it is, and trains faster.

    Args:
        weights: File whose weights a new training starts from: of this package, torchvision, timm (.safetensors too),
            or any program that saves a `state_dict()`, also in a dictionary or behind prefixes. What of it fits is
            taken, a classifier of another number of classes is not, and what is new is said.
        freeze: Parameters that stay as they are: a pattern of their names, such as "conv1.*", or a list of patterns.
            BatchNorm layers among them normalise by their running statistics, which stay too.
        unfreeze_at: Epoch, counted from 0, from whose first step on they are trained too. Until then their gradients
            are computed and thrown away.
        head_lr: Learning rate of the classifier, where --model.optimizer.lr is that of all other parameters. Schedules
            keep the ratio of the two.
    """

    weights: str | None = None
    freeze: list[str] | str | None = None
    unfreeze_at: int | None = None
    head_lr: float | None = None

    def __post_init__(self) -> None:
        bounded("--model.fine_tuning.unfreeze_at", self.unfreeze_at, 1)
        bounded("--model.fine_tuning.head_lr", self.head_lr, 0)
        if self.unfreeze_at is not None and not self.freeze:
            raise ConfigError(
                f"--model.fine_tuning.unfreeze_at={self.unfreeze_at}, but nothing is frozen",
                remedy="add --model.fine_tuning.freeze",
            )

    def parameter_groups(self, network: nn.Module, num_classes: int) -> Any:
        """All parameters, frozen ones too, or with `head_lr` two groups of them, the classifier's last."""
        if self.head_lr is None:
            return network.parameters()
        own = [*network.get_submodule(head_of(network, num_classes)).parameters()]
        others = [parameter for parameter in network.parameters() if parameter not in {*own}]
        return [{"params": others}, {"params": own, "lr": self.head_lr}]


@dataclass(frozen=True)
class Frozen:
    """Names in a network of what is not trained."""

    parameters: frozenset[str] = frozenset()
    norms: tuple[str, ...] = ()  # BatchNorm layers, which normalise by their running statistics and do not move these
    until: int | None = None  # epoch from which on it is trained; None for never

    @classmethod
    def of(cls, settings: FineTuning, network: nn.Module) -> "Frozen":
        """What `settings` freeze. What is never trained asks for no gradients from now on."""
        if not settings.freeze:
            return cls()
        patterns = [settings.freeze] if isinstance(settings.freeze, str) else settings.freeze
        frozen = cls(*matching(network, patterns), settings.unfreeze_at)
        for name in frozen.parameters if frozen.until is None else ():
            network.get_parameter(name).requires_grad_(False)
        return frozen

    def holds_in(self, epoch: int) -> bool:
        """Whether it is not trained in `epoch`."""
        return self.until is None or epoch < self.until

    def switch_norms(self, network: nn.Module, *, training: bool) -> None:
        """Set training or evaluation mode of the BatchNorm layers of `network` that are frozen."""
        for name in self.norms:
            network.get_submodule(name).train(training)

    def told(self, network: nn.Module) -> str:
        """How much of `network` is not trained, in words."""
        until = "" if self.until is None else f" before epoch {self.until}"
        return (
            f"not trained{until}: {len(self.parameters)} of {len([*network.parameters()])} parameters, and the "
            f"statistics of {len(self.norms)} BatchNorm layers"
        )


def matching(network: nn.Module, patterns: Sequence[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The parameters whose names match a pattern of `fnmatch`, and the BatchNorm layers that have no others.

    A layer without parameters is asked by the name of its `running_mean`.

    Raises:
        ConfigError: A pattern matches nothing, or all that could be trained is frozen.
    """
    norms = {
        name: [f"{name}.{key}" for key, _ in layer.named_parameters(recurse=False)] or [f"{name}.running_mean"]
        for name, layer in network.named_modules()
        if isinstance(layer, internals.BatchNorm)
    }
    parameters = {name: tensor.requires_grad for name, tensor in network.named_parameters()}
    known = {*parameters}.union(*norms.values())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            groups = [f"{name}.*" for name, module in network.named_modules() if name and [*module.parameters()]]
            near = get_close_matches(pattern, [*groups, *parameters], n=3, cutoff=0.4) or groups[:3]
            raise ConfigError(
                f"--model.fine_tuning.freeze={pattern} matches no parameter of {type(network).__name__}",
                remedy=f"did you mean {' or '.join(near)}?",
            )
    found = {name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not any(trained for name, trained in parameters.items() if name not in found):
        raise ConfigError(
            f"--model.fine_tuning.freeze={' '.join(patterns)} leaves no parameter of {type(network).__name__} to train",
            remedy="name fewer: 'conv1.*', or ['conv1.*', 'layer1.*']",
        )
    still = tuple(name for name, own in norms.items() if found.issuperset(own))
    return frozenset(found & parameters.keys()), still


def head_of(network: nn.Module, num_classes: int) -> str:
    """The name of the classifier: the last layer with a row of weights for each class."""
    places = ((*name.rpartition("."), its.shape) for name, its in network.named_parameters(remove_duplicate=False))
    found = [layer for layer, _, kind, shape in places if kind == "weight" and shape[:1] == (num_classes,)]
    if not found:
        raise ConfigError(
            f"--model.fine_tuning.head_lr: {type(network).__name__} has no layer with {num_classes} outputs, which "
            "would be its classifier",
            remedy="leave it out",
        )
    return found[-1]


class KeepFrozen(Callback):
    """Lets a module's `network` follow its `frozen` in each epoch, also in a run that is resumed within one."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Set the mode of BatchNorm layers, also where a run is resumed within an epoch.

        Lightning does not call `train()`, and has warned by now of layers that are in evaluation mode.
        """
        frozen = pl_module.frozen
        frozen.switch_norms(pl_module.network, training=not frozen.holds_in(trainer.current_epoch))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.on_train_start(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Throw away gradients of what will be trained later: DistributedDataParallel must have waited for them."""
        frozen = pl_module.frozen
        if frozen.until is not None and frozen.holds_in(trainer.current_epoch):
            for name in frozen.parameters:
                pl_module.network.get_parameter(name).grad = None
