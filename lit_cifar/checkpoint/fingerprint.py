"""What the bits of a training depend on beside its settings: processor or GPU, libraries, threads."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.reporting.environment import cpu_model

KEY = "fingerprint"


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
