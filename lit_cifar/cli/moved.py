"""Settings that have moved: a file that has them in their old places is still read, a command line is told the new."""

from dataclasses import fields
from typing import Any

import yaml  # type: ignore[import-untyped]

from lit_cifar.data.options import GROUPS

# The group of each setting that was one of `data`.
_GROUPS = {field.name: group for group, kind in GROUPS.items() for field in fields(kind)}
# Keys of `--model.ghost_batchnorm` that have another name.
_RENAMED = {"dp_size": "data_parallel_size", "replicas_per_rank": "local_replicas"}


def new_flag(word: str) -> str | None:
    """The flag that is meant by `word`, the name of one that has moved, with or without "--data."; else None."""
    name = word.removeprefix("--data.")
    return f"--data.{_GROUPS[name]}.{name}" if name in _GROUPS else _RENAMED.get(name)


def in_new_places(text: str) -> str:
    """The YAML `text` of a run's settings with those that have moved in their new places."""
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    data = settings.get("data") if isinstance(settings, dict) else None
    if not isinstance(data, dict) or not _GROUPS.keys() & data.keys():
        return text
    moved: str = yaml.safe_dump({**settings, "data": _grouped(data)}, sort_keys=False)
    return moved


def _grouped(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with its settings in their groups; None stood for the default, and what is not augmented had none."""
    grouped = {name: value for name, value in data.items() if name not in _GROUPS}
    for name, value in data.items():
        group = _GROUPS.get(name)
        if group is None or value is None or (group == "augment" and data.get("augment") is False):
            continue
        if not isinstance(grouped.get(group), dict):
            grouped[group] = {}
        grouped[group][name] = value
    return grouped
