"""The command line of a script: the flags of its parsers and their values, and those whose names mean a knob."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial, update_wrapper
from typing import Any, TypeAlias

from lit_cifar.checks.relations.patching import before, patched

Note: TypeAlias = Callable[["Flag"], None]
_BUILT_IN = (int, float, str, bool)
# Knobs that are answered by a flag, and its names.
KNOBS = {
    "batch_size": ("batch_size", "train_batch_size", "per_device_train_batch_size", "micro_batch_size", "bs"),
    "accumulate": (
        *("gradient_accumulation_steps", "grad_accumulation_steps", "grad_accum_steps", "grad_accum", "accum_iter"),
        *("accumulate_grad_batches", "accumulation_steps", "accum_steps", "gradient_accumulation", "accumulate"),
        *("accum", "grad_acc_steps", "gradient_accumulate_every"),
    ),
    "evaluation_batch": (
        *("eval_batch_size", "per_device_eval_batch_size", "val_batch_size", "valid_batch_size", "test_batch_size"),
        *("validation_batch_size", "eval_micro_batch_size", "batch_size_eval", "eval_batch", "val_batch"),
    ),
    "epochs": ("epochs", "num_epochs", "num_train_epochs", "max_epochs", "n_epochs"),
    "amp": ("amp", "use_amp", "fp16", "mixed_precision"),
}


@dataclass(frozen=True)
class Flag:
    """An option of a script."""

    words: tuple[str, ...]  # that name it, such as `-b` and `--batch-size`; one of Hydra ends with a `=`
    value: Any  # in this run: None, or of a built-in type
    kind: str  # the name of its type
    takes_value: bool = True

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
        wanted = Flag((said[knob],), None, "").names if knob in said else names
        fitting = [flag for name in wanted for flag in flags.values() if name in flag.names and _fits(knob, flag)]
        if fitting:  # of several with one name in other groups, the one that was said
            own = said.get(knob, "").strip("-=")
            found[knob] = max(fitting, key=lambda flag: own in {word.strip("-=") for word in flag.words})
    return found


def _fits(knob: str, flag: Flag) -> bool:
    """Whether its type and value can be the knob's: a number above 0, or for `amp` what is on or off."""
    if knob == "amp":
        return flag.kind == "bool"
    return flag.kind in ("int", "float") and bool(flag.value) and flag.value >= 1


def watch_parsers(note: Note) -> None:
    """Call `note` with each flag of each command line that the script reads, after it was read."""
    patched(argparse.ArgumentParser, "parse_known_args", partial(_by_argparse, note))
    patched("click.core:Command", "invoke", before(partial(_by_click, note)))
    patched("tyro", "cli", partial(_by_tyro, note))
    patched("hydra.main", "main", partial(_by_hydra, note))


def _by_argparse(note: Note, parse: Any, parser: argparse.ArgumentParser, *args: Any, **own: Any) -> Any:
    found = parse(parser, *args, **own)
    words = args[0] if args else own.get("args")
    if words is None or {*words} <= {*sys.argv}:
        values = vars(found[0])
        for option in parser._actions:
            if option.option_strings and option.dest in values:
                note(_flag(option.option_strings, values[option.dest], option.type, option.nargs != 0))
    return found


def _by_click(note: Note, command: Any, context: Any) -> None:
    for option in command.params:
        if option.opts[0].startswith("-") and option.name in context.params:
            kind = {"integer": int, "float": float}.get(option.type.name)
            note(_flag(option.opts, context.params[option.name], kind, not (option.is_flag or option.count)))


def _by_tyro(note: Note, parse: Any, *args: Any, **own: Any) -> Any:
    found = parse(*args, **own)
    for name, value in _fields(found):
        note(_flag([f"--{name.replace('_', '-')}"], value, takes_value=not isinstance(value, bool)))
    return found


def _by_hydra(note: Note, make: Any, *args: Any, **own: Any) -> Any:
    def run(task: Any, config: Any) -> Any:
        for name, value in _fields(sys.modules["omegaconf"].OmegaConf.to_container(config)):
            note(_flag([f"{name}="], value))
        return task(config)

    decorator = make(*args, **own)
    # Hydra looks for its files beside the code of the task, which a function of ours would hide.
    return lambda task: decorator(update_wrapper(partial(run, task), task))


def _fields(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values in dataclasses and mappings, by the way to them."""
    inside = value
    if is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: getattr(value, field.name) for field in fields(value)}
    if not isinstance(inside, Mapping):
        yield prefix, value
        return
    for name, part in inside.items():
        yield from _fields(part, f"{prefix}.{name}".lstrip("."))


def _flag(words: Sequence[str], value: Any, kind: Any = None, takes_value: bool = True) -> Flag:
    """A flag with its value, or with what stands for one of no built-in type, which not every process knows."""
    if kind not in _BUILT_IN:
        kind = type(value) if value is not None else str if takes_value else bool
    value = value.value if isinstance(value, Enum) else value
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return Flag(tuple(words), value if type(value) in _BUILT_IN else None, kind.__name__, takes_value)
