"""The records of a run's processes, read back, and the differences between two of them.

A *step* has the whole tensors after one optimizer step, by kind and name: ("parameters", "fc.bias"). Optimizer state is
named after the parameters.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lit_cifar.checks.compare import difference
from lit_cifar.reporting.rank_statistics import AccuracyCount
from lit_cifar.tools.verify.recorder import BUFFERS, OPTIMIZER, PARAMETERS, Key, Piece, Snapshot, Step, is_shared

Bounds: TypeAlias = dict[str, float]  # by kind
Gaps: TypeAlias = Mapping[Key, float]  # differences by kind and name
Logged: TypeAlias = dict[tuple[str, int], float]  # metrics by name and optimizer step, counted from 1

LOSS = "loss"
KINDS = (LOSS, PARAMETERS, BUFFERS, OPTIMIZER)
LOGITS = "logits"  # the kind that is compared after an evaluation
METRICS = "metrics.csv"

# With virtual replicas every bit is the same. Losses are left out: a process has those of its own parts alone.
SAME_BITS = {"parameters": 0.0, "buffers": 0.0, "optimizer": 0.0}
EXACT_BOUND = 1e-9  # bound of every kind in float64, where rounding is far below any mistake
LOGITS_BOUND = 1e-7  # that of logits, in which a deep network magnifies such a difference of its weights
METRIC_BOUND = 1e-5  # metrics add up in float32, whatever the precision of the run is

gap = partial(difference, least_scale=1.0, equal_nan=False)  # small values are compared absolutely


@dataclass(frozen=True)
class Record:
    """A finished run: its folder holds `trace/`, which `Trace` has written, and `run/`."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def resumed(self) -> "Record":
        """The record of a new process that resumed this run before its last step."""
        return Record(self.folder / "resumed")

    @property
    def num_processes(self) -> int:
        return len(self._files("own*.jsonl"))

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that the run has made, counted from 1; a run that refused its input has written none."""
        return sorted(int(path.stem.removeprefix("step").partition("-")[0]) for path in self._files("step*-0.pt"))

    def processes(self, number: int) -> list[dict[str, Any]]:
        """What each process has written down after step `number`; tensors stay on disk until they are used."""
        return [_load(path) for path in self._files(f"step{number}-*.pt")]

    def step(self, number: int) -> Step:
        """The step's whole tensors; those that one process has whole stay on disk until they are used."""
        processes = self.processes(number)
        losses = {process["data_parallel_rank"]: process["loss"] for process in processes}
        loss = torch.tensor(sum(losses.values()) / len(losses), dtype=torch.float64)
        return {(LOSS, LOSS): loss, **_put_together(process["pieces"] for process in processes)}

    def evaluated(self, number: int) -> dict[int, "Evaluated"]:
        """The evaluation by each process after step `number`; empty if there was none."""
        paths = self._files(f"evaluation{number}-*.pt")
        return {int(path.stem.rpartition("-")[2]): Evaluated(**_load(path)) for path in paths}

    @property
    def logged(self) -> Logged:
        """The metrics of the whole run, learning rates and epochs; none with --trainer.logger=false."""
        return {
            (name, int(row["step"]) + 1): float(value)  # the file counts from 0
            for row in csv.DictReader(self.lines(METRICS))
            for name, value in row.items()
            if value and name != "step" and is_shared(name)
        }

    def lines(self, name: str) -> list[str]:
        """Lines of a table in the run folder; none if there is no such table."""
        path = self.run / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def checkpoints(self) -> dict[str, Path]:
        return {path.name: path for path in sorted((self.run / "checkpoints").glob("*.ckpt"))}

    @property
    def snapshots(self) -> list[Snapshot]:
        """What all processes held at each moment."""
        paths = self._files("own*.jsonl")
        return [Snapshot(**json.loads(line)) for path in paths for line in path.read_text().splitlines()]

    def _files(self, pattern: str) -> list[Path]:
        """Files of all processes in their order, which is not alphabetical for more than ten."""
        return sorted((self.folder / "trace").glob(pattern), key=lambda path: (len(path.name), path.name))


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return content


def _put_together(processes: Iterable[Mapping[Key, Piece]]) -> dict[Key, Tensor]:
    """The whole tensors; a part that several processes have is that of the first one."""
    found: dict[Key, dict[tuple[int, int] | None, Tensor]] = {}
    for of_process in processes:
        for key, piece in of_process.items():
            found.setdefault(key, {}).setdefault(piece["divided"], piece["tensor"])
    return {key: _whole(parts) for key, parts in found.items()}


def _whole(parts: Mapping[Any, Tensor]) -> Tensor:
    """The tensor of which these are the parts, by number and dimension that is divided; or by None the whole."""
    if None in parts:
        return parts[None]
    places = sorted(parts)
    return torch.cat([parts[place] for place in places], dim=places[0][1])


def gaps_of_step(found: Step, expected: Step) -> Gaps:
    """The difference of every tensor, in the order of `expected`; infinite where one side has none."""
    return {key: gap(found.get(key), expected.get(key)) for key in {**expected, **found}}


def step_problems(gaps: Gaps, bounds: Bounds, *, step: int) -> list[str]:
    """The first tensor beyond its bound: the loss, then in the order of the network, buffers before parameters.

    A layer's buffers come from its forward pass alone. Parameters and optimizer state of the whole network move as
    soon as one gradient is wrong, so they say less about where a mistake is. Kinds without a bound are left out.
    """
    problems, order = [], (LOSS, BUFFERS, PARAMETERS, OPTIMIZER)
    for (kind, name), size in sorted(gaps.items(), key=lambda gap: order.index(gap[0][0])):
        if size > (bound := bounds.get(kind, math.inf)):
            says = f"differs by {size:.1e}, allowed {bound:.1e}"
            if math.isinf(size):
                says = "is missing, not a number or of another shape"
            problems.append(f"step {step}: {name} {says} ({kind})")
    return first_of(problems)


def first_of(problems: Sequence[str]) -> list[str]:
    """The first problem, and the number of others."""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return [problem + more for problem in problems[:1]]


def note_largest(found: Bounds, gaps: Gaps) -> None:
    """Raise what is `found` of each kind to its largest difference."""
    for (kind, _), size in gaps.items():
        found[kind] = max(found.get(kind, 0.0), size)


@dataclass(frozen=True)
class Evaluated:
    """A process's evaluation, with the samples in the order in which it has read them."""

    ids: Tensor  # int64, (n,)
    labels: Tensor  # int64, (n,)
    logits: Tensor  # (n, num_classes)
    data_parallel_rank: int = 0  # of the process

    @property
    def count(self) -> AccuracyCount:
        return AccuracyCount(int((self.logits.argmax(dim=1) == self.labels).sum()), len(self.labels))

    def gaps(self, wanted: "Evaluated") -> list[tuple[int, float]]:
        """Each sample with the difference of its logits from those of `wanted`, relative to the largest of all samples.

        With a different label it is infinite. Those that `wanted` lacks are left out: see `sample_problems`.
        """
        of_wanted = {sample: row for row, sample in enumerate(wanted.ids.tolist())}
        scale = max(1.0, float(wanted.logits.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        found = []
        for row, sample in enumerate(self.ids.tolist()):
            if (other := of_wanted.get(sample)) is not None:
                size = gap(self.logits[row], wanted.logits[other], least_scale=scale)
                found.append((sample, size if self.labels[row] == wanted.labels[other] else math.inf))
        return found
