"""The command line of a script: the flags of its parsers and their values, and those whose names mean a knob."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial, update_wrapper
from types import ModuleType
from typing import Any

from lit_cifar.checks.relations.patching import patched, when_imported

# Knobs that are answered by a flag, and its names.
KNOBS = {
    "batch_size": ("batch_size", "train_batch_size", "per_device_train_batch_size", "micro_batch_size", "bs"),
    "accumulate": (
        *("gradient_accumulation_steps", "grad_accumulation_steps", "grad_accum_steps", "grad_accum", "accum_iter"),
        *("accumulate_grad_batches", "accumulation_steps", "accum_steps", "gradient_accumulation", "accumulate"),
    ),
    "epochs": ("epochs", "num_epochs", "num_train_epochs", "max_epochs", "n_epochs"),
    "amp": ("amp", "use_amp", "fp16", "mixed_precision"),
}


@dataclass(frozen=True)
class Flag:
    """An option of a script."""

    words: tuple[str, ...]  # that name it, such as `-b` and `--batch-size`; one of Hydra ends with a `=`
    value: Any  # in this run: None, or of a built-in type
    default: Any
    kind: str  # the name of its type
    takes_value: bool = True
    choices: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Its names without dashes and groups: `batch_size` also of `--batch-size` and `data.batch_size=`."""
        return [word.strip("-=").rpartition(".")[2].replace("-", "_").lower() for word in self.words]

    def given(self, value: Any) -> tuple[str, ...]:
        """The arguments of a command that give it this value."""
        word = next((word for word in self.words if word.startswith("--")), self.words[0])
        if word.endswith("="):
            return (f"{word}{value}",)
        return (word, str(value)) if self.takes_value else (word,)


def by_knob(flags: Mapping[str, Flag], said: Mapping[str, str]) -> dict[str, Flag]:
    """The flags that mean a knob, by its name: those that the reader has `said`, else those with its names and type."""
    found = {}
    for knob, names in KNOBS.items():
        wanted = (said[knob].strip("-=").replace("-", "_").lower(),) if knob in said else names
        fitting = [flag for name in wanted for flag in flags.values() if name in flag.names and _fits(knob, flag)]
        if fitting:
            found[knob] = fitting[0]
    return found


def _fits(knob: str, flag: Flag) -> bool:
    """Whether its type and value can be the knob's: a number above 0, or for `amp` what is on or off."""
    if knob == "amp":
        return flag.kind == "bool"
    return flag.kind in ("int", "float") and bool(flag.value) and flag.value >= 1


def watch_parsers(note: Callable[[Flag], None]) -> None:
    """Call `note` with each flag of each command line that the script reads, after it was read."""
    patched(argparse.ArgumentParser, "parse_known_args", partial(_parse, note))
    when_imported("click.core", lambda module: patched(module.Command, "invoke", partial(_invoke, note)))
    when_imported("tyro", lambda module: patched(module, "cli", partial(_by_tyro, note)))
    when_imported("hydra.main", partial(_watch_hydra, note))


def _parse(note: Callable[[Flag], None], parse: Any, parser: argparse.ArgumentParser, *args: Any, **own: Any) -> Any:
    found = parse(parser, *args, **own)
    words = args[0] if args else own.get("args")
    if words is None or {*words} <= {*sys.argv}:
        values = vars(found[0])
        for action in parser._actions:
            if action.option_strings and action.dest in values:
                value, default, takes_value = values[action.dest], action.default, action.nargs != 0
                note(_flag(action.option_strings, value, default, action.type, takes_value, action.choices))
    return found


def _invoke(note: Callable[[Flag], None], invoke: Any, command: Any, context: Any) -> Any:
    for option in command.params:
        if option.opts[0].startswith("-") and option.name in context.params:
            choices, takes_value = getattr(option.type, "choices", ()), not (option.is_flag or option.count)
            value, kind = context.params[option.name], {"integer": int, "float": float}.get(option.type.name)
            note(_flag(option.opts, value, option.default, kind, takes_value, choices))
    return invoke(command, context)


def _by_tyro(note: Callable[[Flag], None], parse: Any, *args: Any, **own: Any) -> Any:
    found = parse(*args, **own)
    for name, value in _fields(found):
        words = [f"--{name.replace('_', '-')}"]
        note(_flag(words, value, value, None, takes_value=not isinstance(value, bool)))
    return found


def _fields(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values in dataclasses and mappings, by the way to them."""
    if is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Mapping):
        inside = {str(name): part for name, part in value.items()}
    else:
        yield prefix, value
        return
    for name, part in inside.items():
        yield from _fields(part, f"{prefix}.{name}" if prefix else name)


def _watch_hydra(note: Callable[[Flag], None], module: ModuleType) -> None:
    def run(task: Any, config: Any) -> Any:
        for name, value in _fields(sys.modules["omegaconf"].OmegaConf.to_container(config)):
            note(_flag([f"{name}="], value, value, None))
        return task(config)

    def decorate(make: Any, *args: Any, **own: Any) -> Any:
        decorator = make(*args, **own)
        # Hydra looks for its files beside the code of the task, which a function of ours would hide.
        return lambda task: decorator(update_wrapper(partial(run, task), task))

    patched(module, "main", decorate)


def _flag(words: Any, value: Any, default: Any, kind: Any, takes_value: bool = True, choices: Any = ()) -> Flag:
    unknown = (str if takes_value else bool) if value is None else type(value)
    known = kind if kind in (int, float, str, bool) else unknown
    named = tuple(str(_plain(choice)) for choice in choices or ())
    return Flag(tuple(words), _plain(value), _plain(default), known.__name__, takes_value, named)


def _plain(value: Any) -> Any:
    """The value if it is of a built-in type, which every process knows; else what stands for it, or None."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if type(value) in (int, float, str, bool) else None
