"""Reads what `Trace` wrote."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from lit_cifar.checkpoint.files import LAST
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.tools.verify.comparison import Step, sample_problems
from lit_cifar.tools.verify.evaluation import Evaluated
from lit_cifar.tools.verify.rank_state import Snapshot, change_problems, peer_problems, put_together, saved_problems

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """A finished run: its folder holds `trace/` and `run/`."""

    folder: Path

    def step(self, number: int) -> Step:
        """The step's whole tensors; those that one process has whole stay on disk until they are used."""
        processes = [_load(path) for path in self._files(f"step{number}-*.pt")]
        losses = {process["dp_rank"]: process["loss"] for process in processes}
        loss = {"loss": torch.tensor(sum(losses.values()) / len(losses), dtype=torch.float64)}
        return {"loss": loss, **put_together(process["pieces"] for process in processes)}

    def evaluated(self, number: int) -> dict[int, Evaluated]:
        """What each process has computed in the evaluation after that step; empty if there was none."""
        paths = self._files(f"evaluation{number}-*.pt")
        return {int(path.stem.rpartition("-")[2]): Evaluated(**_load(path)) for path in paths}

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that the run has made, counted from 1; a run that refused its input has written none."""
        return sorted(int(path.stem.removeprefix("step").partition("-")[0]) for path in self._files("step*-0.pt"))

    def _files(self, pattern: str) -> list[Path]:
        """In the order of the processes, also where there are more than ten."""
        return sorted((self.folder / "trace").glob(pattern), key=lambda path: (len(path.name), path.name))

    @property
    def resumed(self) -> "Record":
        """What a new process has left that resumed this run before its last step."""
        return Record(self.folder / "resumed")

    @cached_property
    def about(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "trace" / "run.json").read_text())
        return content

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def checkpoints(self) -> dict[str, Path]:
        """By name: "last.ckpt" and so on."""
        return {path.name: path for path in sorted((self.run / "checkpoints").glob("*.ckpt"))}

    @cached_property
    def samples(self) -> dict[str, dict[int, list[list[int]]]]:
        """Ids by moment ("step 1", "epoch 0") and data-parallel rank: a list for each process."""
        found: dict[str, dict[int, list[list[int]]]] = {}
        for line in self._lines("samples"):
            found.setdefault(line["when"], {}).setdefault(line["dp_rank"], []).append(line["ids"])
        return found

    def sample_problems(self, reference: "Record") -> list[str]:
        """Steps and evaluations that did not use each sample of the reference once."""
        problems = []
        for when, ranks in reference.samples.items():
            mine = self.samples.get(when, {})
            disagreeing = [rank for rank, readers in mine.items() if any(ids != readers[0] for ids in readers)]
            problems += [
                f"{when}: the processes of data-parallel rank {rank} read different samples" for rank in disagreeing
            ]
            expected = [i for readers in ranks.values() for i in readers[0]]
            found = sample_problems([readers[0] for readers in mine.values()], expected)
            problems += [f"{when}: {problem}" for problem in found]
        return problems

    def first_of_ranks(self, by_process: Mapping[int, T]) -> dict[int, T]:
        """What the first process of each data-parallel rank has, by that rank."""
        ranks = {line["rank"]: line["dp_rank"] for line in self._lines("samples")}
        return {ranks[process]: value for process, value in sorted(by_process.items(), reverse=True)}

    @property
    def ends_of_epochs(self) -> dict[int, int]:
        """The last step of each epoch."""
        found, step = {}, 0
        for line in self._lines("samples"):
            what, number = line["when"].split()[0], int(line["when"].split()[-1])
            if what == "step":
                step = number
            elif what == "epoch":
                found[number] = step
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
            steps.setdefault(line["when"], {})[line["dp_rank"]] = line["parts"]
        problems = []
        for when, of_ranks in steps.items():
            parts = [part for its in of_ranks.values() for part in its]
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


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return content
