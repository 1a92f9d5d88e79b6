"""What the bits of a training with virtual replicas depend on, beside its settings."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.reporting.environment import cpu_model


class Fingerprint(Callback):
    """Writes into checkpoints, with virtual replicas, what the bits depend on. A run that differs there warns."""

    def __init__(self, num_parts: int | None) -> None:
        self.num_parts = num_parts

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.num_parts is not None:
            checkpoint["fingerprint"] = self._found(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        before, now = checkpoint.get("fingerprint", {"virtual replicas": "none"}), self._found(trainer)
        names = [name for name in now if before.get(name, now[name]) != now[name]]
        changed = [f"\n  {name}: {before[name]} before, {now[name]} now" for name in names]
        if trainer.state.fn == TrainerFn.FITTING and changed:
            words = "the bits of this training may differ from those of an uninterrupted run, which depend on"
            rank_zero_warn(words + "".join(changed))

    def _found(self, trainer: Trainer) -> dict[str, str]:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        return {
            "virtual replicas": str(self.num_parts or "none"),
            "processor": torch.cuda.get_device_name() if on_gpu else cpu_model(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "torch": str(torch.__version__),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "threads": str(torch.get_num_threads()),
        }
