"""What a run starts from: the same checkpoint in all processes, and the machine and libraries of the run before.

Processes may find different checkpoints, as a network file system may show: the run ends before it starts. The bits of
a training depend on processor or GPU, libraries and threads: a run says which of them have changed.
"""

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.checkpoint.step_boundary import end_together
from lit_cifar.reporting.environment import cpu_model

KEY = "fingerprint"


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


class Fingerprint(Callback):
    """With `--virtual_replicas`: writes the fingerprint into every checkpoint, and warns if another resumes from it.

    Args:
        num_parts: The number of virtual replicas; without them modes differ by rounding anyway, and nothing is written.
    """

    def __init__(self, num_parts: int | None) -> None:
        self.num_parts = num_parts

    def _of(self, trainer: Trainer) -> dict[str, str]:
        return {"virtual replicas": str(self.num_parts or "none")} | fingerprint(trainer.strategy.root_device)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.num_parts is not None:
            checkpoint[KEY] = self._of(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Warn of what differs, also if only one of checkpoint and run has virtual replicas."""
        if trainer.state.fn != TrainerFn.FITTING or (self.num_parts is None and KEY not in checkpoint):
            return
        before, now = checkpoint.get(KEY, {}), self._of(trainer)
        names = [name for name in now | before if before.get(name) != now.get(name)]
        changes = [f"{name}: {before.get(name, 'not recorded')} before, {now.get(name, 'none')} now" for name in names]
        if changes:
            rank_zero_warn(
                "the bits of this training may differ from those of an uninterrupted run, which depend on\n  "
                + "\n  ".join(changes)
            )


def fingerprint(device: torch.device) -> dict[str, str]:
    """What the kernels of a process that trains on `device` depend on, by name."""
    if device.type == "cuda":
        return {
            "GPU": torch.cuda.get_device_name(device),
            "torch": str(torch.__version__),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }
    return {
        "processor": cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
    }
