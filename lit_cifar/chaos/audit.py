"""Compares the end of a training with that of the uninterrupted run."""

import csv
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.verify.comparison import Step, differences

RESIZED_BOUND = 1e-5  # how much a resized training may differ: another number of processes changes the rounding of sums
_CLOCKED = "per_s"  # suffix of the metrics that depend on the speed of the machine


def distance(found: Path, expected: Path) -> tuple[float, str]:
    """The largest difference between two checkpoints, as `lit_cifar.verify.comparison.difference` measures it, and its
    tensor.

    It is 0 if and only if all parameters, buffers and numbers of the optimizer's state are the same.
    """
    by_kind = differences(_step(read_checkpoint(found)), _step(read_checkpoint(expected)))
    return max((value, name) for by_name in by_kind.values() for name, value in by_name.items())


def position_problems(found: Path, expected: Path) -> list[str]:
    """Where the counters of two checkpoints differ: epoch, optimizer steps, and the schedule's."""
    mine, theirs = read_checkpoint(found), read_checkpoint(expected)
    return [
        f"{name} is {mine.get(name)} at the end, {theirs.get(name)} in the uninterrupted run"
        for name in ("epoch", "global_step", "lr_schedulers")
        if mine.get(name) != theirs.get(name)
    ]


def metric_problems(found: Path, expected: Path) -> list[str]:
    """The first difference between two `metrics.csv`, without metrics that depend on the clock."""
    for mine, theirs in zip(_rows(found), _rows(expected), strict=False):
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                where = f"step {theirs.get('step')} in metrics.csv"
                return [f"{name} of {where} is {mine.get(name)}, {theirs.get(name)} in the uninterrupted run"]
    numbers = [len(list(_rows(path))) for path in (found, expected)]
    return [] if numbers[0] == numbers[1] else [f"metrics.csv has {numbers[0]} lines instead of {numbers[1]}"]


def receipt_problems(found: Path, expected: Path) -> list[str]:
    """Where the data receipts of two runs differ, which no number of processes or restarts may change."""
    mine, theirs = (path.read_text().splitlines() if path.exists() else [] for path in (found, expected))
    if mine == theirs != []:
        return []
    epochs = [number for number, pair in enumerate(zip_longest(mine[1:], theirs[1:])) if pair[0] != pair[1]]
    where = f"from epoch {epochs[0]} on" if epochs else "in its heading, or missing"
    return [f"receipt.csv differs from that of the uninterrupted run {where}"]


def _step(checkpoint: dict[str, Any]) -> Step:
    state, optimizer = checkpoint["state_dict"], checkpoint["optimizer_states"][0]
    trained = [name for name in state if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    names = {index: trained[index] if index < len(trained) else f"parameter {index}" for index in optimizer["state"]}
    by_name = {names[index]: values for index, values in optimizer["state"].items()}
    by_name |= {f"group {number}": group for number, group in enumerate(optimizer["param_groups"])}
    numbers = {
        f"{name}:{key}": torch.as_tensor(value)
        for name, values in by_name.items()
        for key, value in values.items()
        if isinstance(value, Tensor | float | int)
    }
    return {"parameters": state, "optimizer": numbers}


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            kept = {name: value for name, value in row.items() if value and not name.endswith(_CLOCKED)}
            if kept.keys() - {"epoch", "step"}:
                yield kept
