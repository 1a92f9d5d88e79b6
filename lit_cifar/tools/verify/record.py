"""The records of a run's processes, read back, and the differences between two of them.

A *step* has the whole tensors after one optimizer step, by kind and name. Optimizer state is named after the
parameters.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from lit_cifar.checkpoint.atomic import LAST
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.tools.verify.recorder import Piece, Pieces, Snapshot, State, is_shared, short_digest

Step: TypeAlias = Mapping[str, Mapping[str, Tensor]]
Bounds: TypeAlias = dict[str, float]
Logged: TypeAlias = dict[tuple[str, int], float]  # metrics by name and optimizer step, counted from 1
T = TypeVar("T")

KINDS = ("loss", "parameters", "buffers", "optimizer")
LOGITS = "logits"  # the kind that is compared after an evaluation
METRICS = "metrics.csv"

# With virtual replicas every bit is the same. Losses are left out: a process has those of its own parts alone.
SAME_BITS = {"parameters": 0.0, "buffers": 0.0, "optimizer": 0.0}
EXACT_BOUND = 1e-9  # bound of every kind in float64, where rounding is far below any mistake
METRIC_BOUND = 1e-5  # metrics add up in float32, whatever the precision of the run is


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
    def size(self) -> tuple[int, int]:
        """Number of processes, and of nodes."""
        content = json.loads((self.folder / "trace" / "run.json").read_text())
        return content["world_size"], content["num_nodes"]

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that the run has made, counted from 1; a run that refused its input has written none."""
        return sorted(int(path.stem.removeprefix("step").partition("-")[0]) for path in self._files("step*-0.pt"))

    def step(self, number: int) -> Step:
        """The step's whole tensors; those that one process has whole stay on disk until they are used."""
        processes = [_load(path) for path in self._files(f"step{number}-*.pt")]
        losses = {process["data_parallel_rank"]: process["loss"] for process in processes}
        loss = {"loss": torch.tensor(sum(losses.values()) / len(losses), dtype=torch.float64)}
        return {"loss": loss, **_put_together(process["pieces"] for process in processes)}

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

    def first_of_ranks(self, by_process: Mapping[int, T]) -> list[T]:
        """The values of the first process of each data-parallel rank, in the order of these ranks."""
        ranks = {line["rank"]: line["data_parallel_rank"] for line in self._lines("samples")}
        first = {ranks[process]: value for process, value in sorted(by_process.items(), reverse=True)}
        return [value for _, value in sorted(first.items())]

    @property
    def ends_of_epochs(self) -> dict[int, int]:
        found, step = {}, 0
        for line in self._lines("samples"):
            what, number = line["when"].split()[0], int(line["when"].split()[-1])
            if what == "step":
                step = number
            elif what == "epoch":
                found[number] = step
        return found

    def sample_problems(self, reference: "Record") -> list[str]:
        """Steps and evaluations that did not use each sample of the reference once."""
        problems, samples = [], self._samples
        for when, ranks in reference._samples.items():
            mine = samples.get(when, {})
            unlike = [rank for rank, readers in mine.items() if any(ids != readers[0] for ids in readers)]
            problems += [
                f"{when}: the processes of data-parallel rank {rank} read different samples" for rank in unlike
            ]
            expected = [i for readers in ranks.values() for i in readers[0]]
            found = sample_problems([readers[0] for readers in mine.values()], expected)
            problems += [f"{when}: {problem}" for problem in found]
        return problems

    @property
    def _samples(self) -> dict[str, dict[int, list[list[int]]]]:
        """Ids by moment ("step 1", "epoch 0") and data-parallel rank: a list for each process."""
        found: dict[str, dict[int, list[list[int]]]] = {}
        for line in self._lines("samples"):
            found.setdefault(line["when"], {}).setdefault(line["data_parallel_rank"], []).append(line["ids"])
        return found

    def count_problems(self) -> list[str]:
        """Metrics of a process that did not count each of its samples once."""
        return [
            f"{line['when']}: {name} has counted {count} samples in a process that read {len(line['ids'])}"
            for line in self._lines("samples")
            for name, count in line["counted"].items()
            if count != len(line["ids"])
        ]

    def weight_problems(self) -> list[str]:
        """Steps in whose mean loss a part of the batch does not count by its number of samples."""
        steps: dict[str, dict[int, list[tuple[int, float]]]] = {}
        for line in self._lines("samples"):
            steps.setdefault(line["when"], {})[line["data_parallel_rank"]] = line["parts"]
        problems = []
        for when, of_ranks in steps.items():
            parts = [part for of_rank in of_ranks.values() for part in of_rank]
            total = sum(size for size, _ in parts)
            wrong = [(size, weight) for size, weight in parts if not math.isclose(weight, size * len(parts) / total)]
            problems += [
                f"{when}: a part with {size} of {total} samples counts {weight:.6g}-fold in a mean of {len(parts)}"
                for size, weight in wrong[:1]
            ]
        return problems

    def own_problems(self) -> list[str]:
        """Values of a process that differ from those of its peers, its own earlier ones, or the checkpoint's."""
        snapshots = [Snapshot(**line) for line in self._lines("own")]
        whole = [snapshot for snapshot in snapshots if snapshot.when == "whole network"]
        last = self.checkpoints.get(LAST)
        saved = [] if last is None else saved_problems(whole, read_checkpoint(last)["state_dict"])
        return [*peer_problems(snapshots), *change_problems(snapshots), *saved]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        paths = self._files(f"{name}*.jsonl")
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    def _files(self, pattern: str) -> list[Path]:
        """Files of all processes in their order, which is not alphabetical for more than ten."""
        return sorted((self.folder / "trace").glob(pattern), key=lambda path: (len(path.name), path.name))


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return content


def _put_together(processes: Iterable[Pieces]) -> dict[str, dict[str, Tensor]]:
    """The whole tensors by kind and name; a part that several processes have is that of the first one."""
    found: dict[str, dict[str, list[Piece]]] = {}
    for pieces in processes:
        for kind, by_name in pieces.items():
            for name, piece in by_name.items():
                found.setdefault(kind, {}).setdefault(name, []).append(piece)
    return {
        kind: {
            name: _whole({tuple(p["at"]): p["tensor"] for p in reversed(pieces)}, pieces[0]["dims"])
            for name, pieces in of.items()
        }
        for kind, of in found.items()
    }


def _whole(pieces: Mapping[tuple[int, ...], Tensor], dims: Sequence[int | None]) -> Tensor:
    """The tensor whose parts are at these places along the axes of a mesh.

    The first axis divides the parts of the last one: `fully_shard` comes after tensor parallelism.
    """
    for dim in dims:
        rows: dict[tuple[int, ...], list[Tensor]] = {}
        for (_, *rest), piece in sorted(pieces.items(), key=lambda item: item[0]):
            rows.setdefault(tuple(rest), []).append(piece)
        pieces = {rest: row[0] if dim is None else torch.cat(row, dim) for rest, row in rows.items()}
    return pieces[()]


def differences(found: Step, expected: Step) -> dict[str, dict[str, float]]:
    """The difference of every tensor by kind and name, in the order of `expected`; infinite where one side has none."""
    return {
        kind: {
            name: difference(found[kind][name], expected[kind][name])
            if name in found[kind] and name in expected[kind]
            else math.inf
            for name in {**expected[kind], **found[kind]}
        }
        for kind in KINDS
        if kind in expected
    }


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest |found - expected| over max(1, largest |expected|); infinite for other shapes or anything not finite."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    dtype = torch.promote_types(torch.promote_types(found.dtype, expected.dtype), torch.float32)
    a, b = found.detach().to("cpu", dtype), expected.detach().to("cpu", dtype)
    if torch.equal(a, b):  # infinite values too, which have no difference
        return 0.0
    gap = _largest_size(a - b) / max(1.0, _largest_size(b))
    return gap if math.isfinite(gap) else math.inf


def _largest_size(tensor: Tensor) -> float:
    """Largest absolute value, NaN if any element is; `abs().max()` would make a copy."""
    return max(abs(float(extreme)) for extreme in torch.aminmax(tensor))


def step_problems(of_step: Mapping[str, Mapping[str, float]], bounds: Bounds, *, step: int) -> list[str]:
    """The first tensor beyond its bound: the loss, then in the order of the network, buffers before parameters.

    A layer's buffers come from its forward pass alone. Parameters and optimizer state of the whole network move as
    soon as one gradient is wrong, so they say less about where a mistake is. Kinds without a bound are left out.
    """
    problems = []
    for kind in ("loss", "buffers", "parameters", "optimizer"):
        bound = bounds.get(kind, math.inf)
        for name, gap in of_step.get(kind, {}).items():
            if gap > bound:
                says = f"differs by {gap:.1e}, allowed {bound:.1e}"
                if math.isinf(gap):
                    says = "is missing, not a number or of another shape"
                problems.append(f"step {step}: {name} {says} ({kind})")
    return first(problems)


def first(problems: Sequence[str]) -> list[str]:
    """The first problem, and the number of others."""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return [problem + more for problem in problems[:1]]


def largest(of_step: Mapping[str, Mapping[str, float]]) -> Bounds:
    return {kind: max(values.values(), default=0.0) for kind, values in of_step.items()}


def sample_problems(found: Sequence[Sequence[int]], expected: Sequence[int]) -> list[str]:
    """Phrases for the ids that are missing, seen too often or foreign, of those that the processes of a step read.

    `found` holds the ids of every data-parallel rank, `expected` those of the reference, in any order.
    """
    seen, wanted = Counter(i for of_rank in found for i in of_rank), Counter(expected)
    missing, surplus = sorted((wanted - seen).elements()), sorted((seen - wanted).elements())
    problems = []
    if missing:
        problems.append(f"{len(missing)} samples are missing, e.g. {missing[0]}")
    if surplus:
        problems.append(f"{len(surplus)} samples are unknown or used too often, e.g. {surplus[0]}")
    return problems


@dataclass(frozen=True)
class Evaluated:
    """A process's evaluation, with the samples in the order in which it has read them."""

    ids: Tensor  # int64, (n,)
    labels: Tensor  # int64, (n,)
    logits: Tensor  # (n, num_classes)
    sizes: Tensor  # int64, number of samples of each batch

    @property
    def counts(self) -> tuple[int, int]:
        """Right and seen samples."""
        return self.of_replicas(1)[0]

    def of_replicas(self, count: int) -> list[tuple[int, int]]:
        """Right and seen samples of each replica among which every batch is divided by `Tensor.chunk`, as in `dp`."""
        right = torch.split(self.logits.argmax(dim=1) == self.labels, self.sizes.tolist())
        found = [[0, 0] for _ in range(count)]
        for batch in right:
            for own, chunk in zip(found, batch.chunk(count), strict=False):  # a small batch has fewer chunks
                own[0] += int(chunk.sum())
                own[1] += len(chunk)
        return [(own[0], own[1]) for own in found]

    def gaps(self, wanted: "Evaluated") -> list[tuple[int, float]]:
        """Each sample with its largest |logit - wanted| over max(1, largest |wanted|); infinite if not finite.

        With a different label it is infinite, too. Samples that `wanted` lacks are left out: `sample_problems` reports
        their ids.
        """
        place = {sample: row for row, sample in enumerate(wanted.ids.tolist())}
        rows = [row for row, sample in enumerate(self.ids.tolist()) if sample in place]
        others = [place[sample] for sample in self.ids[rows].tolist()]
        gaps = (self.logits[rows].double() - wanted.logits[others].double()).abs().amax(dim=1)
        gaps = gaps / wanted.logits.double().abs().max().clamp(min=1.0)
        gaps[~gaps.isfinite() | (self.labels[rows] != wanted.labels[others])] = torch.inf
        return list(zip(self.ids[rows].tolist(), gaps.tolist(), strict=True))


def peer_problems(snapshots: Sequence[Snapshot]) -> list[str]:
    """The first difference, at each moment, between processes that must hold the same."""
    moments: dict[str, list[Snapshot]] = {}
    for snapshot in snapshots:
        moments.setdefault(snapshot.when, []).append(snapshot)
    return [problem for when, peers in moments.items() for problem in first([*_disagreements(when, peers)])]


def _disagreements(when: str, peers: Sequence[Snapshot]) -> Iterator[str]:
    seen: dict[tuple[str, str, int | None], tuple[int, str]] = {}
    for peer in peers:
        for name, (part, replica, value) in peer.state.items():
            rank, former = seen.setdefault((name, part, replica), (peer.rank, value))
            if value != former:
                yield f"{when}: {name} of process {peer.rank} is not that of process {rank}"


def change_problems(snapshots: Sequence[Snapshot]) -> list[str]:
    """The first change, for each process and moment, since an earlier moment that must be the same."""
    by_moment = {(snapshot.rank, snapshot.when): snapshot for snapshot in snapshots}
    found = []
    for now in snapshots:
        before = by_moment.get((now.rank, now.same_as or ""))
        changed = [] if before is None else _changed(before.state, now.state)
        found += first([f"{now.when}: {name} of process {now.rank} is not that of {now.same_as}" for name in changed])
    return found


def _changed(before: State, now: State) -> Iterator[str]:
    """Names whose bits differ in two snapshots; later replicas may have been given the first one's statistics."""
    for name, (part, replica, value) in now.items():
        _, former_replica, former = before.get(name, (part, replica, value))
        if value != former and not (former_replica or replica):
            yield name


def saved_problems(snapshots: Sequence[Snapshot], saved: Mapping[str, Any]) -> list[str]:
    """Processes with a whole network that differs from the checkpoint, whose "state_dict" is `saved`."""
    wanted = {name: short_digest(value) for name, value in saved.items()}
    found = []
    for snapshot in snapshots:
        own = {name: value for name, (_, replica, value) in snapshot.state.items() if not replica}
        other = [name for name, value in own.items() if value != wanted.get(name.split()[0])]
        of = f"of process {snapshot.rank} is not the checkpoint's"
        found += first([f"{snapshot.when}: {name} {of}" for name in other])
    return found
