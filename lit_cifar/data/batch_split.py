"""How a global batch is split among the replicas of the model: plain arithmetic, without a process group.

A *replica* is one copy of the network that sees its own part of every global batch. Under `ddp` each process holds one;
under `dp` one process holds several; under `pp` several processes hold one together. What follows from the number of
replicas (how a batch is cut, who counts which samples) is computed from these objects, so it can be tested as a table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """The part of a batch that this process reads, and how it divides that part.

    `dp_size` and `dp_rank` are the usual names for data parallelism over processes. They do not mean the mode `dp`: its
    one process reads every batch, so both are those of one process.

    Attributes:
        dp_size: Parts into which processes divide a batch.
        dp_rank: This process's part, from 0. Processes that hold one replica together have the same.
        replicas_per_rank: Replicas among which one process divides its part once more: more than 1 under `dp` only.
        num_microbatches: Pieces in which a replica's layers see its part, one after the other.
    """

    dp_size: int = 1
    dp_rank: int = 0
    replicas_per_rank: int = 1
    num_microbatches: int = 1

    @classmethod
    def of(cls, strategy: Any) -> "BatchSplit":
        """The split of a Lightning strategy, before or after its processes have started.

        `distributed_sampler_kwargs` is Lightning's own interface for "who reads which part of the data". Our strategies
        define the other two where they are not 1.
        """
        data_parallel = getattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        return cls(
            dp_size=data_parallel["num_replicas"],
            dp_rank=data_parallel["rank"],
            replicas_per_rank=getattr(strategy, "replicas_per_rank", 1),
            num_microbatches=getattr(strategy, "num_microbatches", 1),
        )

    @property
    def num_replicas(self) -> int:
        """Replicas over all processes: the number by which a global batch must be divisible."""
        return self.dp_size * self.replicas_per_rank

    def ghost_batches(self, *, accumulation: int = 1) -> "GhostBatches":
        """The chunks of a global batch that is accumulated over `accumulation` steps."""
        return GhostBatches(
            dp_size=self.dp_size,
            accumulation=accumulation,
            replicas_per_rank=self.replicas_per_rank,
            num_microbatches=self.num_microbatches,
        )


@dataclass(frozen=True, kw_only=True)
class GhostBatches:
    """Cuts a global batch into chunks that pass through the layers together, and so are normalised together.

    The fields are flags of `--model.ghost_batchnorm`.

    Attributes:
        dp_size: The data-parallel size R: rank r takes the positions r, r + R, ... of what is left to cut.
        accumulation: Steps over which a batch is accumulated; step `a` comes before step `a + 1`.
        replicas_per_rank: Into how many the replicas of one rank then divide it, by `Tensor.chunk`.
        num_microbatches: Into how many a replica then divides its part, by `Tensor.tensor_split`.
        synchronised: Whether the ranks of an accumulation step are normalised together.
    """

    dp_size: int = 1
    accumulation: int = 1
    replicas_per_rank: int = 1
    num_microbatches: int = 1
    synchronised: bool = False

    def __post_init__(self) -> None:
        if min(self.dp_size, self.accumulation, self.replicas_per_rank, self.num_microbatches) < 1:
            raise ValueError(f"not a way to cut a batch: {self}")

    def positions(self, num_samples: int) -> list[list[Tensor]]:
        """The chunks that each replica normalises, in order: positions in the batch, int64, not empty."""
        if self.synchronised:
            step_of = torch.arange(num_samples) // self.dp_size % self.accumulation
            steps = [(step_of == step).nonzero().flatten() for step in range(self.accumulation)]
            return [[step for step in steps if len(step)]]
        replicas = [
            list(self._of_replica(torch.arange(num_samples), rank, replica))
            for rank in range(self.dp_size)
            for replica in range(self.replicas_per_rank)
        ]
        return [chunks for chunks in replicas if chunks]

    def _of_replica(self, batch: Tensor, rank: int, replica: int) -> Iterator[Tensor]:
        for step in range(self.accumulation):
            part = batch[step * self.dp_size + rank :: self.accumulation * self.dp_size]
            # `chunk` may return fewer than asked for, the last replicas then have no samples.
            own = part.chunk(self.replicas_per_rank)[replica : replica + 1]
            for samples in own:
                yield from (piece for piece in samples.tensor_split(self.num_microbatches) if len(piece))
