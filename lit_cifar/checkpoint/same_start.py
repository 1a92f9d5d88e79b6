"""A run ends before it starts if its processes have found different checkpoints, as a network file system may show."""

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.checkpoint.step_boundary import end_together


class Start(NamedTuple):
    """What a process starts from."""

    digest: str | None  # of the checkpoint's content; None for no checkpoint
    text: str  # file and position, or why there is none
    host: str = socket.gethostname()


def disagreement(starts: Sequence[Start]) -> str | None:
    """In words, if the ranks, in this order, do not all start from the same content."""
    first = starts[0]
    rank = next((rank for rank, start in enumerate(starts) if start.digest != first.digest), None)
    if rank is None:
        return None
    other = starts[rank]
    return (
        f"the processes would start from different checkpoints\n"
        f"  rank 0 on {first.host}: {first.text}\n"
        f"  rank {rank} on {other.host}: {other.text}\n"
        "  let every machine see the same files, then start again"
    )


class SameStart(Callback):
    """Compares the starts of all processes once they have met, and ends all of them if one has another than rank 0.

    `start` is this process's own. Under `ddp_spawn` all have that of the parent.
    """

    def __init__(self, start: Start) -> None:
        self._start = start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or not dist.is_initialized():
            return
        starts: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(starts, self._start)
        problem = disagreement(starts)
        if problem is not None:
            end_together(trainer, f"error: {problem}", status=2)
