"""Precisions: which one is fast on this machine, and which its devices lack."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.errors import ConfigError

_CPU_FLAGS = {"avx512_bf16", "amx_bf16"}


def cpu_has_bf16() -> bool:
    """Whether the CPU has instructions for bfloat16. If not, a step takes 2 to 31 times as long (Xeon, AMD Zen 3)."""
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and not _CPU_FLAGS.isdisjoint(cpus.read_text().split())


def choose_fast(arguments: Namespace, *, before: Mapping[str, Any]) -> None:
    """Fill in `--trainer.precision` and `--model.channels_last` in the `arguments` of a fit, for `--autotune=true`.

    A precision that is given stands. A run that goes on keeps what it had `before`, its settings, because others round
    differently. Several machines, which may have unlike processors, are refused.
    """
    trainer, model = arguments.trainer, arguments.model
    if before:
        trainer.precision, model.channels_last = before["trainer"]["precision"], before["model"]["channels_last"]
        return
    if trainer.num_nodes > 1 or int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        problem = "--autotune=true decides by the processor, and that of another machine may decide otherwise"
        remedy = "pass --trainer.precision=bf16-mixed --model.channels_last=true, or leave it out"
        raise ConfigError(problem, remedy=remedy)
    has_gpu = torch.cuda.is_available() and trainer.accelerator != "cpu"
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if has_gpu else cpu_has_bf16()
    is_exact = trainer.deterministic or arguments.virtual_replicas is not None
    trainer.precision = trainer.precision or ("bf16-mixed" if has_bf16 and not is_exact else "32-true")
    model.channels_last = model.channels_last or trainer.precision == "bf16-mixed"


def check_precision(trainer: Trainer, *, asked: object) -> None:
    """Refuse a precision that Lightning has replaced by another, and warn of one that is slow here."""
    if str(asked).startswith("16") and trainer.precision == "bf16-mixed":
        problem = f"--trainer.precision={asked} needs a GPU, as it scales the loss; here Lightning would take bfloat16"
        raise ConfigError(problem, remedy="pass --trainer.precision=bf16-mixed")
    is_on_cpu = trainer.strategy.root_device.type == "cpu"
    if trainer.precision.startswith("bf16") and is_on_cpu and not cpu_has_bf16():
        where = f"--trainer.precision={asked} on a CPU without instructions for bfloat16"
        rank_zero_warn(f"{where}: a step may take 2 to 30 times as long as with --trainer.precision=32-true")
