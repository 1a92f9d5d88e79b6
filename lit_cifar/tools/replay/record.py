"""Reads what the recorders of all ranks have written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_cifar.tools.replay.events import Call, Start, Step


@dataclass
class Record:
    """The events of all ranks in a folder."""

    folder: Path
    num_ranks: int
    device: torch.device

    def remarks(self) -> tuple[list[str], list[str]]:
        """Why a rank could not write down what it did; and what it has noticed beside."""
        reasons: list[str] = []
        hints: list[str] = []
        for rank in range(self.num_ranks):
            path = self.folder / f"{rank}.pt"
            if path.exists():
                of_rank = torch.load(path, weights_only=True)
                reasons += of_rank[0]
                hints += of_rank[1]
            else:
                reasons.append(f"the record of rank {rank} cannot be seen from rank 0")
        return [*dict.fromkeys(reasons)], [*dict.fromkeys(hints)]

    def segments(self, rank: int) -> list[list[Path]]:
        """Paths of events, in their order; a segment ends with the last optimizer step before another call."""
        found: list[list[Path]] = []
        stepped = True
        for path in sorted(self.folder.glob(f"{rank}-*.pt")):
            if path.stem.endswith(Call.__name__) and stepped:
                found.append([])
            stepped = path.stem.endswith(Step.__name__) or (stepped and not path.stem.endswith(Call.__name__))
            found[-1].append(path)
        return found

    def load(self, path: Path) -> Any:
        """Batches may hold any objects. The ranks of this very run have written them, where nobody else can write."""
        return torch.load(path, map_location=self.device, weights_only=False)

    def starts(self) -> list[Start]:
        return [self.load(path) for path in self.folder.glob("start-*.pt")]

    @property
    def mebibytes(self) -> float:
        return sum(path.stat().st_size for path in self.folder.iterdir()) / 2**20
