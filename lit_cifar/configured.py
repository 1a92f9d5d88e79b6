"""Objects that a configuration describes by a class or function and its arguments, as jsonargparse writes them."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from torch import nn

from lit_cifar.errors import ConfigError


def arguments_of(config: Namespace | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in `config`: those that a signature names, and those that go into `**kwargs`."""
    return {**config.get("init_args", {}), **config.get("dict_kwargs", {})}


def made(config: Namespace | Mapping[str, Any], /, *args: Any, **changed: Any) -> Any:
    """What the class or function returns for `args` and the arguments in `config`, some of them `changed`."""
    return resolve_name(config["class_path"])(*args, **arguments_of(config) | changed)


def own_network(configured: dict[str, Any] | None) -> nn.Module | None:
    """The user's own network in a run's `config.yaml`, made as by `fit`; None for a network of this package."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--network", type=nn.Module | None)
    try:
        network: nn.Module | None = parser.instantiate(parser.parse_object({"network": configured})).network
    except (ArgumentError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(str(error), remedy="let Python find the class, and check its arguments") from error
    return network
