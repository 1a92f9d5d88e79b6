"""Objects that a configuration describes by a class or function and its arguments, as jsonargparse writes them."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from jsonargparse import Namespace


def arguments_of(config: Namespace | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in `config`: those that a signature names, and those that go into `**kwargs`."""
    return {**config.get("init_args", {}), **config.get("dict_kwargs", {})}


def made(config: Namespace | Mapping[str, Any], *args: Any, **changed: Any) -> Any:
    """What the class or function returns for `args` and the arguments in `config`, some of them `changed`."""
    return resolve_name(config["class_path"])(*args, **arguments_of(config) | changed)
