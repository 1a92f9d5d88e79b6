"""Numbers that a script tells: to `report`, TensorBoard, wandb, mlflow, accelerate, as metrics, and in print."""

import builtins
import logging
import re
import sys
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, TypeAlias

from lit_cifar.checks.compare import difference
from lit_cifar.checks.relations.patching import after, before, patched
from lit_cifar.checks.relations.plan import Trace

SCORES = ("score", "rescored")
Hear: TypeAlias = Callable[[str, Mapping[str, Any]], None]  # gets who was told, and what by name
# Modules and their classes that are told numbers, by which methods.
_METHODS = {
    ("torch.utils.tensorboard.writer", "SummaryWriter"): ("add_scalar", "add_scalars"),
    ("tensorboardX.writer", "SummaryWriter"): ("add_scalar", "add_scalars"),
    ("transformers.trainer", "Trainer"): ("log",),
    ("accelerate.accelerator", "Accelerator"): ("log",),
}
# Printed numbers that count: those with decimals or in percent, outside of lists. Others may be of batches or samples.
_NUMBER = re.compile(r"(?<![\w.])(?<!\d:)[-+]?\d+(?:\.(\d+))?(?:e([-+]?\d{1,3}))?(?!\.?\w)(\s?%)?", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")  # of a terminal
_LIST = re.compile(r"\[[^][]*\d[,\s]+[-+\d][^][]*\]")
_LONGEST, _MOST = 5, 2000  # words of a name, and characters of a text: a longer one is no result


class At(NamedTuple):
    """The name of a number, and the number of steps before it was told."""

    name: str
    steps: int

    def __str__(self) -> str:
        return f"{self.name} after {self.steps} steps"


@dataclass
class Told:
    """What a process writes down."""

    results: set[str] = field(default_factory=set)  # names in `report` behind an evaluation
    heard: dict[At, set[float]] = field(default_factory=dict)  # all values told to others behind one
    digits: dict[str, float] = field(default_factory=dict)  # of what is printed: what one of the last digit is worth
    of_batches: set[str] = field(default_factory=set)  # names of what is printed while batches are read


def results(trace: Trace, without: Container[str] = ()) -> dict[At, float]:
    """Results of evaluations, without these names. What has several values, such as the loss of each batch, is none."""
    told, reported = trace.part(Told), _reported(trace)
    found = {at: value for at, value in reported.items() if at.name in told.results or at.name.startswith("val")}
    found |= {at: value for at, (value, *more) in told.heard.items() if not more and at.name not in told.of_batches}
    return {at: value for at, value in found.items() if at.name not in without and not at.name.startswith(SCORES)}


def _reported(trace: Trace) -> dict[At, float]:
    return {At(name, steps): value for steps, values in trace.logged for name, value in values.items()}


def apart(one: Trace, other: Trace, limit: float) -> set[str]:
    """The names of numbers that two runs do not share, though both tell them."""
    first, second = (results(trace) | _reported(trace) for trace in (one, other))
    return {at.name for at in first.keys() & second.keys() if difference(first[at], second[at]) > limit}


def listen(hear: Hear, hear_line: Callable[[str], None]) -> None:
    """Call these with all that is told and printed from now on. Neither wandb nor mlflow sends it anywhere."""
    patched(builtins, "print", before(partial(_hear_print, hear_line)))
    patched(sys.stdout, "write", before(partial(_hear_written, hear_line)))
    patched(logging.Logger, "handle", before(partial(_hear_record, hear_line)))
    for end in ("", "_str"):
        patched("tqdm.std:tqdm", f"set_postfix{end}", after(lambda bar: hear_line(str(bar.postfix))))
        patched("tqdm.std:tqdm", f"set_description{end}", after(lambda bar: hear_line(str(bar.desc))))
    for (module, owner), names in _METHODS.items():
        for name in names:
            patched(f"{module}:{owner}", name, _hearing(hear, owner, 1))
    patched("wandb", "init", partial(_init_wandb, hear))
    for name in ("log_metric", "log_metrics"):
        patched("mlflow", name, _hearing(hear, "mlflow", 0))
    patched("mlflow", "set_tracking_uri", lambda *_, **__: None)
    patched("torchmetrics.metric:Metric", "__init__", after(partial(_follow_metric, hear)))
    patched("ignite.engine.engine:Engine", "run", after(lambda engine: hear("ignite", engine.state.metrics)))


def numbers_in(text: str) -> dict[str, tuple[float, float]]:
    """Numbers, each with what one of its last digit is worth.

    They have the last words before them in their line as names, in which `#` stands for each other number.
    """
    found = {}
    for line in _LIST.sub("[]", _COLOUR.sub("", text)).splitlines() if len(text) <= _MOST else ():
        for number in _NUMBER.finditer(line):
            decimals, exponent, percent = number.groups()
            if decimals or exponent or percent:
                before = " ".join(_NUMBER.sub("#", line[: number.start()]).split()[-_LONGEST:])
                value = float(number.group().removesuffix(percent or ""))
                digit = float(f"1e{int(exponent or 0) - len(decimals or '')}")  # no power, which may overflow
                found[before.strip(" :=([{'\",")] = value, digit
    return found


def _hear_record(hear_line: Callable[[str], None], _: Any, record: logging.LogRecord) -> None:
    with suppress(Exception):  # of arguments that do not fit: the script's handlers report it, and go on
        hear_line(record.getMessage())


def _hear_print(hear_line: Callable[[str], None], *values: Any, sep: Any = " ", file: Any = None, **_: Any) -> None:
    if file in (None, sys.stdout):
        hear_line((" " if sep is None else sep).join(map(str, values)))


def _hear_written(hear_line: Callable[[str], None], text: str) -> None:
    """Hear what is no display that is written again and again, and no number that `print` writes behind its name."""
    if "\r" not in text and not _NUMBER.match(_COLOUR.sub("", text).lstrip()):
        hear_line(text)


def _hearing(hear: Hear, who: str, place: int) -> Callable[..., Any]:
    """For a function that is told numbers by name at this place of its arguments, or a name and then numbers."""

    def called(own: Any, *args: Any, **settings: Any) -> Any:
        result = own(*args, **settings)
        bound = signature(own).bind(*args, **settings)  # in the order of its parameters
        what, *more = [*bound.args, *bound.kwargs.values()][place:]
        if not isinstance(what, Mapping):
            values = more[0] if isinstance(more[0], Mapping) else {"": more[0]}
            what = {f"{what}/{name}".rstrip("/"): value for name, value in values.items()}
        hear(who, what)
        return result

    return called


def _init_wandb(hear: Hear, init: Any, *args: Any, **settings: Any) -> Any:
    run = init(*args, **settings | {"mode": "disabled"})
    patched(run, "log", _hearing(hear, "wandb", 0))
    sys.modules["wandb"].log = run.log  # type: ignore[attr-defined]
    return run


def _follow_metric(hear: Hear, metric: Any) -> None:
    def compute(own: Any) -> Any:
        value = own()
        hear("torchmetrics", value if isinstance(value, Mapping) else {type(metric).__name__: value})
        return value

    patched(metric, "compute", compute)
