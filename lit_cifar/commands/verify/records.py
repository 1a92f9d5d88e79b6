"""Reads what `Trace` wrote."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lit_cifar.commands.verify.compare import Step, sample_problems


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
        """Number of processes, chunks, counts."""
        content: dict[str, Any] = json.loads((self.folder / "trace" / "run.json").read_text())
        return content

    @property
    def counts(self) -> tuple[int, int]:
        """Right and seen samples of the evaluation, over all ranks."""
        counts = self.about["counts"]
        return sum(right for right, _ in counts), sum(seen for _, seen in counts)

    @property
    def checkpoint(self) -> Path:
        """The one that the run wrote at its end."""
        return self.folder / "run" / "checkpoints" / "last.ckpt"

    @cached_property
    def samples(self) -> dict[str, dict[int, list[list[int]]]]:
        """Ids by moment ("step 1", "evaluation") and shard: a list for every process that reads this shard."""
        found: dict[str, dict[int, list[list[int]]]] = {}
        for path in sorted((self.folder / "trace").glob("samples*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                found.setdefault(line["when"], {}).setdefault(line["shard"], []).append(line["ids"])
        return found

    def sample_problems(self, reference: "Record") -> list[str]:
        """Where the samples of a step or of the evaluation are not those of the reference, each once."""
        problems = []
        for when, shards in reference.samples.items():
            mine = self.samples.get(when, {})
            disagreeing = [shard for shard, readers in mine.items() if any(ids != readers[0] for ids in readers)]
            problems += [f"{when}: the processes of shard {shard} read other samples" for shard in disagreeing]
            expected = [i for readers in shards.values() for i in readers[0]]
            found = sample_problems([readers[0] for readers in mine.values()], expected)
            problems += [f"{when}: {problem}" for problem in found]
        return problems
