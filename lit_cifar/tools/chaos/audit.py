"""Compares a training that was hit with the baseline run: its samples, its end, its metrics.

A job that is killed runs some steps again. Of every optimizer step only the last run counts: earlier ones came after
the checkpoint from which the job resumed, and were lost with the process.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.tools.chaos.sample_log import LoggedStep, Start
from lit_cifar.tools.verify.comparison import Step, differences

RESIZED_BOUND = 1e-5  # how much a resized training may differ: another number of processes changes the rounding of sums
_CLOCKED = "per_s"  # suffix of the metrics that depend on the speed of the machine

StepKey: TypeAlias = tuple[int, int]  # epoch and optimizer step
Batches: TypeAlias = dict[StepKey, list[int]]  # the ids of the global batch of every step, by data-parallel rank


@dataclass
class Audit:
    """What is wrong with the samples of a whole training, and what it cost to get there."""

    missing: int = 0  # samples of an epoch that no step counts
    doubled: int = 0  # samples that an epoch counts too often, or that are not in the data set
    moved: int = 0  # steps whose samples are not those of the same step of the baseline run
    repeated: int = 0  # runs of an optimizer step that did not count
    problems: list[str] = field(default_factory=list)  # in words, the first step first


def audit(lines: Iterable[LoggedStep], *, baseline: Mapping[StepKey, Iterable[int]]) -> Audit:
    """Compare the samples of a job with those of the baseline run, step by step and epoch by epoch."""
    lines = list(lines)
    batches, problems = effective(lines)
    result = Audit(repeated=num_repeated(lines), problems=problems)
    for key in sorted(batches.keys() | baseline.keys()):
        if Counter(batches.get(key, ())) != Counter(baseline.get(key, ())):
            result.moved += 1
            what = (
                "other samples than in the uninterrupted run" if key in baseline else "is not in the uninterrupted run"
            )
            result.problems.append(f"{_words(key)}: {what if key in batches else 'was never run'}")
    seen, wanted = _by_epoch(batches), _by_epoch(baseline)
    missing, doubled = wanted - seen, seen - wanted
    result.missing, result.doubled = missing.total(), doubled.total()
    for epoch in sorted({epoch for epoch, _ in missing | doubled}):
        for samples, what in ((missing, "are missing"), (doubled, "are unknown or counted too often")):
            if ids := sorted(sample for of_epoch, sample in samples.elements() if of_epoch == epoch):
                result.problems.append(f"epoch {epoch}: {len(ids)} samples {what}, e.g. {ids[0]}")
    return result


def effective(lines: Iterable[LoggedStep]) -> tuple[Batches, list[str]]:
    """The global batch of every step as it was last run, and where processes disagree that must read the same."""
    read: dict[tuple[StepKey, Start], dict[tuple[int, int], list[int]]] = {}
    for line in lines:
        by_rank = read.setdefault(((line.epoch, line.step), line.start), {})
        by_rank.setdefault((line.dp_rank, line.rank), []).extend(line.ids)
    last_run = dict(sorted(read))
    batches: Batches = {key: [] for key in last_run}
    problems = []
    for key, start in last_run.items():
        for dp_rank, ranks in groupby(sorted(read[key, start].items()), key=lambda item: item[0][0]):
            first, *others = (ids for _, ids in ranks)
            batches[key] += first
            if any(ids != first for ids in others):
                problems.append(f"{_words(key)}: the processes of data-parallel rank {dp_rank} read different samples")
    return batches, problems


def num_repeated(lines: Iterable[LoggedStep]) -> int:
    """Runs of an optimizer step beyond the one that counts."""
    runs = {(line.epoch, line.step, line.start) for line in lines}
    return len(runs) - len({(epoch, step) for epoch, step, _ in runs})


def _by_epoch(batches: Mapping[StepKey, Iterable[int]]) -> Counter[tuple[int, int]]:
    """How often each sample was used in each epoch."""
    return Counter((epoch, sample) for (epoch, _), ids in batches.items() for sample in ids)


def _words(key: StepKey) -> str:
    return f"epoch {key[0]}, step {key[1]}"


# The end of a run folder -------------------------------------------------------------------------------------------


def distance(found: Path, expected: Path) -> tuple[float, str]:
    """The largest difference between two checkpoints, as `verify` measures it, and its tensor.

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
    mine, theirs = ([*_rows(path)] for path in (found, expected))
    for own, other in zip(mine, theirs, strict=False):
        for name in sorted(own.keys() | other.keys()):
            if own.get(name) != other.get(name):
                where = f"step {other.get('step')} in metrics.csv"
                return [f"{name} of {where} is {own.get(name)}, {other.get(name)} in the uninterrupted run"]
    return [] if len(mine) == len(theirs) else [f"metrics.csv has {len(mine)} lines instead of {len(theirs)}"]


def receipt_problems(found: Path, expected: Path) -> list[str]:
    """Where the `receipt.csv` of two runs differ, which no number of processes or restarts may change."""
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
