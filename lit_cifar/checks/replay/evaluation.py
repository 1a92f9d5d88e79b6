"""Findings about evaluations: whether a logged metric is one of the whole set, and of one model."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lit_cifar.checks.repeated_step.digests import digest
from lit_cifar.checks.repeated_step.reduction import gamma
from lit_cifar.checks.replay.verdict import Finding, Report


@dataclass
class Logged:
    """Sums of the values that this process has logged under a name, weighted by the sizes of the batches."""

    total: float = 0.0
    magnitude: float = 0.0
    num_samples: int = 0
    num_batches: int = 0
    is_guessed: bool = False  # whether Lightning has guessed the size of a batch

    def add(self, value: float, size: int) -> None:
        self.total += value * size
        self.magnitude += abs(value) * size
        self.num_samples += size
        self.num_batches += 1


@dataclass
class Evaluation:
    """The means that one evaluation logs."""

    module: pl.LightningModule
    logged: dict[str, Logged] = field(default_factory=dict)
    batch: Any = None  # the batch that is evaluated now
    beside: set[str] = field(default_factory=set)  # names of values that are no means over its batches

    def __post_init__(self) -> None:
        self._counts = self._updates()
        self._replaced = patch.object(self.module, "log", partial(self._log, self.module.log))
        self._replaced.start()

    def close(self) -> None:
        self._replaced.stop()

    def seen(self) -> "Seen":
        """The result for this rank, after all batches."""
        kept = [name for name, number in self._updates().items() if number > self._counts.get(name, 0) > 0]
        buffers = {name: digest(buffer).bits for name, buffer in self.module.named_buffers()}
        return Seen(self.logged, kept, buffers, self.beside)

    def _updates(self) -> dict[str, int]:
        """Number of batches that each metric has counted."""
        return {name: metric.update_count for name, metric in self.module.named_modules() if isinstance(metric, Metric)}

    def _log(self, log: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        plain = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if plain and self.batch is not None and kwargs.get("reduce_fx", "mean") in ("mean", torch.mean):
            size = kwargs.get("batch_size")
            logged = self.logged.setdefault(name, Logged())
            logged.is_guessed |= size is None
            logged.add(float(value), size or extract_batch_size(self.batch))
        elif plain:
            self.beside.add(name)
        log(name, value, *args, **kwargs)


@dataclass
class Seen:
    logged: dict[str, Logged]
    kept: list[str]  # metrics that have counted before the evaluation and in it
    buffers: dict[str, int]  # bits of their digests
    beside: Collection[str] = ()


def judge_evaluation(
    report: Report, seen: Sequence[Seen], metrics: Mapping[str, Any], read: Sequence[Sequence[int]], offered: int = 0
) -> None:
    """Compare each logged mean with the mean over all samples of all ranks; `read`: ids of the samples by rank.

    `offered` is the number of all samples, 0 if it is not known or not all were asked for. The bound is that of sums in
    float32, to which each batch and each rank is added once.
    """
    of_ranks = [one.logged for one in seen]
    for name in of_ranks[0]:
        of_name = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        if name not in metrics:
            continue
        num_samples = sum(one.num_samples for one in of_name)
        true, logged = sum(one.total for one in of_name) / num_samples, float(metrics[name])
        roundings = max(one.num_batches for one in of_name) + len(of_name) + 3
        bound = gamma(roundings, torch.float32) * sum(one.magnitude for one in of_name) / num_samples
        report.counts["samples"] = max(report.counts["samples"], num_samples)
        report.counts["metrics"] += 1
        if not _is_within(logged, true, bound):
            own = of_name[0].total / of_name[0].num_samples
            why = "ranks or batches of unequal size weigh alike"
            if _is_within(logged, own, bound):
                why = "it is that of rank 0's samples alone, pass sync_dist=True"
            text = f"is logged as {logged:.9g}, the mean over all {num_samples} samples is {true:.9g}: {why}"
            report.findings.append(Finding("evaluation", report.first_step, None, name, text))
        num_read = sum(map(len, read))
        if of_name[0].is_guessed and 0 < num_read < num_samples:
            text = f"{name} is weighted by batches of {num_samples} samples in all, as Lightning guesses"
            report.note(f"{text}, and {num_read} are read: pass batch_size to self.log")
    if report.counts["metrics"]:
        report.not_looked_at.append("whether each logged value is a mean over samples, whatever the size of batches")
    if beside := {*seen[0].beside} | {name for name in of_ranks[0] if name not in metrics}:
        what = "which are logged at the end, of one of several loaders, or not as means"
        report.not_looked_at.append(f"{', '.join(sorted(beside))}, {what}")
    distinct = {sample for ids in read for sample in ids}
    if repeated := sum(map(len, read)) - len(distinct):
        report.note(f"{repeated} of {len(distinct)} samples are evaluated again: a sampler's padding")
    if 0 < len(distinct) < offered:
        report.note(f"{len(distinct)} of {offered} samples are evaluated, as with drop_last")
    if unlike := [n for n, bits in seen[0].buffers.items() if any(one.buffers.get(n) != bits for one in seen[1:])]:
        report.note(f"the ranks evaluate with unlike buffers, as {unlike[0]}: what they log is of several models")
    if seen[0].kept:
        report.note(f"{seen[0].kept[0]} goes on counting from before the evaluation: call reset() on it")


def _is_within(value: float, expected: float, bound: float) -> bool:
    return abs(value - expected) <= bound if math.isfinite(expected) else str(value) == str(expected)
