"""Paths as a user writes them."""

import os
import re
from typing import Any

from jsonargparse import Namespace

from lit_cifar.errors import ConfigError

# Options that hold a path, by their last name, of ours and of other people's loggers and callbacks.
_OURS = {"run_dir", "ckpt_path", "root", "predict_dir", "weights"}
_NAMES = _OURS | {"dirpath", "save_dir", "root_dir"}


def expand_paths(config: dict[str, Any], prefix: str = "--") -> None:
    """Expand, in place, every path in a parsed configuration."""
    for name, value in config.items():
        if value == "" and name in _OURS:  # as where a shell has no such variable
            raise ConfigError(f"{prefix}{name}= is empty", remedy="leave it out, or name a path")
        if isinstance(value, str) and name in _NAMES:
            config[name] = expanded(value, given=f"{prefix}{name}={value}")
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Namespace | dict):
                expand_paths(vars(inner) if isinstance(inner, Namespace) else inner, f"{prefix}{name}.")


def expanded(path: str, *, given: str) -> str:
    """`path` with the folder of `~` or `~user` and the values of `$VARIABLES`, which a shell leaves alone after a "=".

    Raises:
        ConfigError: There is no such user or variable. `given` is what to quote.
    """
    found = os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111  # which leaves what is unknown
    if unknown := re.search(r"^~[^/]*|\$(\w+|\{\w+\})", found):
        raise ConfigError(f"{given}: there is no {unknown[0]}", remedy="write the path out, from / on")
    return found
