"""Finds the parts of a network that a training leaves as they are, and keeps them so; finds its classifier."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.optim import Optimizer

from lit_cifar import internals
from lit_cifar.errors import ConfigError


def matching(network: nn.Module, patterns: Sequence[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The parameters whose names match a pattern of `fnmatch`, and the BatchNorm layers that have no others.

    A layer without parameters is asked by the name of its `running_mean`. A `ConfigError` says that a pattern matches
    nothing, or that all that could be trained is frozen.
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
            problem = f"--model.fine_tuning.freeze={pattern} matches no parameter of {type(network).__name__}"
            raise ConfigError(problem, remedy=f"did you mean {' or '.join(near)}?")
    found = {name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not any(trained for name, trained in parameters.items() if name not in found):
        problem = f"--model.fine_tuning.freeze={' '.join(patterns)} leaves nothing of {type(network).__name__} to train"
        raise ConfigError(problem, remedy="name fewer: 'conv1.*', or ['conv1.*', 'layer1.*']")
    still = tuple(name for name, own in norms.items() if found.issuperset(own))
    return frozenset(found & parameters.keys()), still


def head_of(network: nn.Module, num_classes: int) -> str:
    """The name of the classifier: the last layer with a row of weights for each class."""
    places = ((*name.rpartition("."), its.shape) for name, its in network.named_parameters(remove_duplicate=False))
    found = [layer for layer, _, kind, shape in places if kind == "weight" and shape[:1] == (num_classes,)]
    if not found:
        lacks = f"{type(network).__name__} has no classifier of {num_classes} outputs"
        raise ConfigError(f"--model.fine_tuning.head_lr: {lacks}", remedy="leave it out")
    return found[-1]


class KeepFrozen(Callback):
    """Lets a module's `network` follow its `frozen` in each epoch, also in a run that is resumed within one."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Set the mode of BatchNorm layers, also within an epoch, where Lightning does not call `train()`."""
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
