"""Which samples a replica of the model sees together: plain arithmetic, without a process group.

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
class Layout:
    """Replicas over processes and within this process."""

    # Parts into which processes cut the data. Processes that hold parts of one replica share a shard.
    num_shards: int = 1
    shard: int = 0  # this process's part, from 0 to `num_shards - 1`
    replicas_per_shard: int = 1  # replicas among which one process divides its part once more (`dp`; 1 elsewhere)
    num_microbatches: int = 1  # pieces in which a replica's layers see its part, one after the other

    def __post_init__(self) -> None:
        counts = (self.num_shards, self.replicas_per_shard, self.num_microbatches)
        if min(counts) < 1 or not 0 <= self.shard < self.num_shards:
            raise ValueError(f"not a layout: {self}")

    @classmethod
    def of(cls, strategy: Any) -> "Layout":
        """The layout of a Lightning strategy, before or after its processes have started.

        `distributed_sampler_kwargs` is Lightning's own interface for "who reads which part of the data". Our strategies
        define the other two where they are not 1.
        """
        shards = getattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        return cls(
            num_shards=shards["num_replicas"],
            shard=shards["rank"],
            replicas_per_shard=getattr(strategy, "replicas_per_shard", 1),
            num_microbatches=getattr(strategy, "num_microbatches", 1),
        )

    @property
    def num_replicas(self) -> int:
        """Replicas over all processes: the number by which a global batch must be divisible."""
        return self.num_shards * self.replicas_per_shard

    def ghost_batches(self, *, accumulation: int = 1) -> "GhostBatches":
        """How this layout cuts a global batch that is accumulated over `accumulation` steps."""
        return GhostBatches(
            num_shards=self.num_shards,
            accumulation=accumulation,
            replicas_per_shard=self.replicas_per_shard,
            num_microbatches=self.num_microbatches,
        )


@dataclass(frozen=True, kw_only=True)
class GhostBatches:
    """How a global batch is cut into chunks that pass through the layers together, and so are normalised together.

    Attributes:
        num_shards: Shard `s` of `S` takes the positions s, s + S, ... of what is left to cut.
        accumulation: Steps over which a batch is accumulated; step `a` comes before step `a + 1`.
        replicas_per_shard: Into how many the replicas of one process then divide it, by `Tensor.chunk`.
        num_microbatches: Into how many a replica then divides its part, by `Tensor.tensor_split`.
        synchronised: Whether the shards of an accumulation step are normalised together.
    """

    num_shards: int = 1
    accumulation: int = 1
    replicas_per_shard: int = 1
    num_microbatches: int = 1
    synchronised: bool = False

    def __post_init__(self) -> None:
        if min(self.num_shards, self.accumulation, self.replicas_per_shard, self.num_microbatches) < 1:
            raise ValueError(f"not a way to cut a batch: {self}")

    def positions(self, num_samples: int) -> list[list[Tensor]]:
        """For each replica the chunks that it normalises, in their order; positions in the batch, int64, not empty."""
        if self.synchronised:
            step_of = torch.arange(num_samples) // self.num_shards % self.accumulation
            steps = [(step_of == step).nonzero().flatten() for step in range(self.accumulation)]
            return [[step for step in steps if len(step)]]
        replicas = [
            list(self._of_replica(torch.arange(num_samples), shard, replica))
            for shard in range(self.num_shards)
            for replica in range(self.replicas_per_shard)
        ]
        return [chunks for chunks in replicas if chunks]

    def _of_replica(self, batch: Tensor, shard: int, replica: int) -> Iterator[Tensor]:
        for step in range(self.accumulation):
            part = batch[step * self.num_shards + shard :: self.accumulation * self.num_shards]
            # `chunk` may return fewer than asked for, the last replicas then have no samples.
            own = part.chunk(self.replicas_per_shard)[replica : replica + 1]
            for samples in own:
                yield from (piece for piece in samples.tensor_split(self.num_microbatches) if len(piece))
