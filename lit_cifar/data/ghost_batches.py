"""The chunks of a global batch that the layers normalise together: plain arithmetic, without a process group."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_cifar.errors import ConfigError, bounded
from lit_cifar.mode import Layout


@dataclass(frozen=True, kw_only=True)
class GhostBatches:
    """Cuts a global batch into chunks that pass through the layers together, and so are normalised together.

    The fields are flags of `--model.ghost_batchnorm`.

    Attributes:
        data_parallel_size: The data-parallel size R: rank r takes the positions r, r + R, ... of an accumulation step.
        accumulation: Steps over which a batch is accumulated; step `a` comes before step `a + 1`.
        local_replicas: Number of replicas of one rank, which then divide its part by `Tensor.chunk`.
        num_microbatches: Number of pieces into which a replica then divides its part, by `Tensor.tensor_split`.
        synchronised: Whether the ranks of an accumulation step are normalised together.
    """

    data_parallel_size: int = 1
    accumulation: int = 1
    local_replicas: int = 1
    num_microbatches: int = 1
    synchronised: bool = False

    @classmethod
    def of(cls, layout: Layout, *, accumulation: int = 1) -> "GhostBatches":
        """The chunks of a mode whose global batch is accumulated over `accumulation` steps."""
        return cls(
            data_parallel_size=layout.data_parallel_size,
            accumulation=accumulation,
            local_replicas=layout.local_replicas,
            num_microbatches=layout.num_microbatches,
        )

    def __post_init__(self) -> None:
        for name, size in self._sizes.items():
            bounded(f"--model.ghost_batchnorm.{name}", size, 1, needed=True)

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: size for name, size in vars(self).items() if name != "synchronised"}

    def check(self, layout: Layout, batch_size: int) -> None:
        """Refuse more chunks than a batch has images, and a run whose mode, of this `layout`, has chunks of its own."""
        if layout != Layout():
            problem = f"--model.ghost_batchnorm computes as a mode does on one device; this run has a mode: {layout}"
            raise ConfigError(problem, remedy="leave it out, or --trainer.strategy, with --trainer.devices=1")
        if (num_parts := math.prod(self._sizes.values())) > batch_size:
            name, size = max(self._sizes.items(), key=lambda item: item[1])
            most = max(batch_size * size // num_parts, 1)
            problem = f"--model.ghost_batchnorm cuts a batch of {batch_size} images into {num_parts} parts"
            raise ConfigError(problem, remedy=f"pass --model.ghost_batchnorm.{name}={most} or less")

    def positions(self, num_samples: int) -> list[list[Tensor]]:
        """The chunks that each replica normalises, in order: positions in the batch, int64, not empty."""
        if self.synchronised:
            step_of = torch.arange(num_samples) // self.data_parallel_size % self.accumulation
            steps = [(step_of == step).nonzero().flatten() for step in range(self.accumulation)]
            return [[step for step in steps if len(step)]]
        batch = torch.arange(num_samples)
        replicas = [
            list(self._of_replica(batch, rank, replica))
            for rank in range(self.data_parallel_size)
            for replica in range(self.local_replicas)
        ]
        return [chunks for chunks in replicas if chunks]

    def _of_replica(self, batch: Tensor, rank: int, replica: int) -> Iterator[Tensor]:
        for step in range(self.accumulation):
            part = batch[step * self.data_parallel_size + rank :: self.accumulation * self.data_parallel_size]
            # `chunk` may return fewer than asked for, the last replicas then have no samples.
            for samples in part.chunk(self.local_replicas)[replica : replica + 1]:
                yield from (piece for piece in samples.tensor_split(self.num_microbatches) if len(piece))
