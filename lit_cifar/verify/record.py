"""Reads what `Trace` wrote."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.verify.comparison import Step, sample_problems
from lit_cifar.verify.logged_metrics import Logged, logged
from lit_cifar.verify.rank_state import Snapshot, change_problems, peer_problems, saved_problems


@dataclass(frozen=True)
class Record:
    """A finished run: its folder holds `trace/` and `run/`."""

    folder: Path

    def step(self, number: int) -> Step:
        """The step's tensors; they stay on disk until they are used."""
        path = self.folder / "trace" / f"step{number}.pt"
        step: Step = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return step

    @property
    def num_steps(self) -> int:
        """Steps that the run has made; a run that refused its input has written none."""
        return len(list((self.folder / "trace").glob("step*.pt")))

    @cached_property
    def about(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "trace" / "run.json").read_text())
        return content

    @property
    def counts(self) -> tuple[int, int]:
        """Correctly classified and evaluated samples, over all ranks."""
        counts = self.about["counts"]
        return sum(right for right, _ in counts), sum(seen for _, seen in counts)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "run" / "checkpoints" / "last.ckpt"

    @property
    def logged(self) -> Logged:
        return logged(self.folder / "run")

    @property
    def acted(self) -> bool:
        """Whether the wrong code of a planted mistake has run in any process."""
        return any((self.folder / "trace").glob("acted*"))

    @cached_property
    def samples(self) -> dict[str, dict[int, list[list[int]]]]:
        """Ids by moment ("step 1", "epoch 0", "evaluation") and data-parallel rank: a list for each process."""
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

    def count_problems(self) -> list[str]:
        """Metrics of a process that did not count each of its samples once."""
        return [
            f"{line['when']}: {name} has counted {count} samples in a process that read {len(line['ids'])}"
            for line in self._lines("samples")
            for name, count in line["counted"].items()
            if count != len(line["ids"])
        ]

    def own_problems(self) -> list[str]:
        """Values of a process that differ from those of its peers, its own earlier ones, or the checkpoint's."""
        snapshots = [Snapshot(**line) for line in self._lines("own")]
        whole = [snapshot for snapshot in snapshots if snapshot.when == "whole network"]
        saved = read_checkpoint(self.checkpoint)["state_dict"]
        return [*peer_problems(snapshots), *change_problems(snapshots), *saved_problems(whole, saved)]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        paths = sorted((self.folder / "trace").glob(f"{name}*.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]
