"""Runs of the command line, started like a user's, and the errors that they print."""

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lit_cifar.errors import ConfigError
from lit_cifar.launch import forked
from lit_cifar.launch.forked import EndedRun

LIMIT_S = 900.0
# What the processes of `fit` import, but for the command line, which lies above this room.
TRAINER = ("lightning.pytorch.cli", "lit_cifar.reporting.run_report", "lit_cifar.strategies")
ERROR = "lit_cifar: error: "
_SHOWN = 3  # lines shown of a run that has failed; a user's mistake takes five, with its remedy

run = partial(forked.run, module="lit_cifar", preload=TRAINER, limit_s=LIMIT_S)  # words begin with a subcommand


def last_words(ended: EndedRun) -> str:
    """How a run that failed has ended, and the last that it has printed."""
    reason = "ran into the time limit" if ended.status is None else f"exit status {ended.status}"
    last = (f"  {line[:160]}" for line in _error(ended) or _lines(ended)[-_SHOWN:])
    return "\n".join([f"{reason} after {ended.seconds:.0f} s", *last])


def refusal(ended: EndedRun) -> ConfigError:
    lines = _error(ended) or [line.strip() for line in _lines(ended)[-5:]]
    *problem, remedy = lines if len(lines) > 1 else [*lines, "see python -m lit_cifar fit --help"]
    return ConfigError("\n".join(problem) or "the configuration cannot be read", remedy=remedy)


def _error(ended: EndedRun) -> list[str]:
    """The error that the command line, or the first of several ranks, has printed."""
    start, *more = ended.stderr.partition(ERROR)[2].splitlines() or [""]
    return [start, *(line.strip() for line in takewhile(lambda line: line.startswith("  "), more))] if start else []


def _lines(ended: EndedRun) -> list[str]:
    return [line for line in ended.stderr.splitlines() if line.strip()]


def all_settings(flags: Sequence[str], *, folder: Path) -> dict[str, Any]:
    """Every setting of `fit` with its value, after defaults and files."""
    ended = run(["fit", *flags, "--print_config"], folder=folder)
    if ended.status != 0:
        raise refusal(ended)
    return dict(yaml.safe_load(ended.stdout))
