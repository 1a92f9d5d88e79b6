"""Precisions that this machine's devices lack."""

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.errors import ConfigError


def cpu_has_bf16() -> bool:
    """Whether the CPU's convolutions compute in bfloat16. If not, they take 25 to 31 times as long (AMD Zen 3)."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def check_precision(trainer: Trainer, *, asked: object) -> None:
    """Refuse a precision that Lightning has replaced by another, and warn of one that is slow here."""
    if str(asked).startswith("16") and trainer.precision == "bf16-mixed":
        raise ConfigError(
            f"--trainer.precision={asked} needs a GPU: it scales the loss for float16. On the CPU Lightning "
            "would compute in bfloat16",
            remedy="pass --trainer.precision=bf16-mixed",
        )
    is_on_cpu = trainer.strategy.root_device.type == "cpu"
    if trainer.precision.startswith("bf16") and is_on_cpu and not cpu_has_bf16():
        rank_zero_warn(
            f"--trainer.precision={asked} on a CPU without instructions for bfloat16: a step may take 30 "
            "times as long as with --trainer.precision=32-true"
        )
