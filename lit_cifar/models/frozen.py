"""Finds the parts of a network that a training leaves as they are, and its classifier."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from lit_cifar import internals
from lit_cifar.errors import ConfigError


def matching(network: nn.Module, patterns: Sequence[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The parameters whose names match a pattern of `fnmatch`, and the BatchNorm layers that have no others.

    A layer without parameters is named by its `running_mean`. A `ConfigError` says if nothing matches, or is trained.
    """
    norms = {
        name: [f"{name}.{key}" for key, _ in layer.named_parameters(recurse=False)] or [f"{name}.running_mean"]
        for name, layer in network.named_modules()
        if isinstance(layer, internals.BatchNorm)
    }
    parameters = dict(network.named_parameters(remove_duplicate=False))  # a tied weight has several names
    known = {*parameters}.union(*norms.values())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            groups = [f"{name}.*" for name, module in network.named_modules() if name and [*module.parameters()]]
            near = get_close_matches(pattern, [*groups, *parameters], n=3, cutoff=0.4) or groups[:3]
            problem = f"--model.fine_tuning.freeze={pattern} matches no parameter of {type(network).__name__}"
            raise ConfigError(problem, remedy=f"did you mean {' or '.join(near)}?")
    found = {name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)}
    still = {parameters[name] for name in found & parameters.keys()}
    if still.issuperset(its for its in parameters.values() if its.requires_grad):
        problem = f"--model.fine_tuning.freeze={' '.join(patterns)} leaves nothing of {type(network).__name__} to train"
        raise ConfigError(problem, remedy="name fewer: 'conv1.*', or ['conv1.*', 'layer1.*']")
    return frozenset(found & parameters.keys()), tuple(name for name, own in norms.items() if found.issuperset(own))


def head_of(network: nn.Module, num_classes: int) -> str:
    """The name of the classifier: the last layer with a row of weights for each class."""
    places = ((*name.rpartition("."), its.shape) for name, its in network.named_parameters(remove_duplicate=False))
    found = [layer for layer, _, kind, shape in places if kind == "weight" and shape[:1] == (num_classes,) != shape]
    if not found:
        lacks = f"{type(network).__name__} has no classifier of {num_classes} outputs"
        raise ConfigError(f"--model.fine_tuning.head_lr: {lacks}", remedy="leave it out")
    return found[-1]
