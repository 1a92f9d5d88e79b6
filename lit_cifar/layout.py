"""Which replica of the model a process holds: plain arithmetic, without a process group.

A *replica* is one copy of the network that sees its own part of every global batch. Under `ddp` each process holds one;
under `dp` one process holds several. What follows from the number of replicas (how a batch is cut, who counts which
samples) is computed from this one object, so it can be tested as a table.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Replicas over processes and within this process.

    Attributes:
        num_shards: Parts into which processes cut the data. Processes that hold parts of one replica share a shard.
        shard: This process's part, from 0 to `num_shards - 1`.
        replicas_per_shard: Replicas among which one process divides its part once more (`dp`; 1 elsewhere).
    """

    num_shards: int = 1
    shard: int = 0
    replicas_per_shard: int = 1

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.replicas_per_shard < 1 or not 0 <= self.shard < self.num_shards:
            raise ValueError(f"not a layout: {self}")

    @classmethod
    def of(cls, strategy: Any) -> "Layout":
        """The layout of a Lightning strategy, before or after its processes have started.

        Reads `distributed_sampler_kwargs`, Lightning's own interface for "who reads which part of the data", and
        `replicas_per_shard`, which our strategies define where one process holds several replicas.
        """
        shards = getattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        return cls(
            num_shards=shards["num_replicas"],
            shard=shards["rank"],
            replicas_per_shard=getattr(strategy, "replicas_per_shard", 1),
        )

    @property
    def num_replicas(self) -> int:
        """Replicas over all processes: the number by which a global batch must be divisible."""
        return self.num_shards * self.replicas_per_shard
