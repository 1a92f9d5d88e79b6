"""Parts of a network that a training leaves as they are, and the classifier, which may learn faster."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from lit_cifar import internals
from lit_cifar.errors import ConfigError


@dataclass(frozen=True)
class Frozen:
    """Names in a network of what is not trained."""

    parameters: frozenset[str] = frozenset()
    norms: tuple[str, ...] = ()  # BatchNorm layers, which normalise by their running statistics and do not move these

    @classmethod
    def matching(cls, network: nn.Module, patterns: Sequence[str]) -> "Frozen":
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
                raise _no_match(pattern, [*parameters], kind=type(network).__name__)
        found = {name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)}
        if patterns and not any(trained for name, trained in parameters.items() if name not in found):
            raise ConfigError(
                f"--model.freeze={' '.join(patterns)} leaves no parameter of {type(network).__name__} to train",
                remedy="name fewer: 'conv1.*', or ['conv1.*', 'layer1.*']",
            )
        still = tuple(name for name, own in norms.items() if found.issuperset(own))
        return cls(frozenset(found & parameters.keys()), still)


def _no_match(pattern: str, names: list[str], *, kind: str) -> ConfigError:
    """The refusal of a pattern, with the nearest names and nearest groups of them."""
    groups = dict.fromkeys(
        f"{'.'.join(name.split('.')[:end])}.*" for name in names for end in range(1, name.count(".") + 1)
    )
    near = get_close_matches(pattern, [*groups, *names], n=3, cutoff=0.4) or [*groups, *names][:3]
    return ConfigError(
        f"--model.freeze={pattern} matches no parameter of {kind}",
        remedy=f"did you mean {' or '.join(near)}?",
    )


def head_of(network: nn.Module, num_classes: int) -> str:
    """The name of the classifier: the last layer with a row of weights for each class."""
    places = ((*name.rpartition("."), its.shape) for name, its in network.named_parameters(remove_duplicate=False))
    found = [layer for layer, _, kind, shape in places if kind == "weight" and shape[:1] == (num_classes,)]
    if not found:
        raise ConfigError(
            f"--model.head_lr: {type(network).__name__} has no layer with {num_classes} outputs, which would be its "
            "classifier",
            remedy="leave it out",
        )
    return found[-1]
