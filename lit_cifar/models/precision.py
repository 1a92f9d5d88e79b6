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
_FUSED_FLAG = "model.optimizer.init_args.fused"
_FAST: dict[str, Any] = {"trainer.precision": "bf16-mixed", "model.channels_last": True}
_FAST_ON_GPU: dict[str, Any] = {"trainer.benchmark": True, _FUSED_FLAG: True}
_FUSED = ("lit_cifar.NesterovSGD", "torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")
_FUSED_MODES = ("auto", "dp", "ddp", "ddp_spawn")
_CHOICE = "bf16-mixed, as this processor is fast in it; --trainer.precision=32-true takes it back"


def cpu_has_bf16() -> bool:
    """Whether the CPU has instructions for bfloat16. If not, a step takes 2 to 31 times as long (Xeon, AMD Zen 3)."""
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and not _CPU_FLAGS.isdisjoint(cpus.read_text().split())


def choose_fast(arguments: Namespace) -> str:
    """Fill in what is fast on this machine where the `arguments` of a fit leave it open; the choice in words, if any.

    With instructions for bfloat16 it is bf16-mixed and channels_last; on a GPU also cuDNN's search and an optimizer in
    one kernel. Nothing is chosen beside a precision or plugin of the user's, where results are to be exact, for a
    network of the user's own, which may need another layout, and on several machines, whose processors may differ.
    """
    trainer = arguments.trainer
    is_on_gpu = torch.cuda.is_available() and trainer.accelerator != "cpu"
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if is_on_gpu else cpu_has_bf16()
    is_exact = trainer.deterministic or arguments.virtual_replicas is not None
    has_others = trainer.num_nodes > 1 or int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1
    is_own = arguments.model.network is not None or trainer.plugins is not None
    if not has_bf16 or is_exact or has_others or is_own or trainer.precision not in (None, "bf16-mixed"):
        return ""
    was_left_open = trainer.precision is None
    _fill_in(arguments, _FAST | _FAST_ON_GPU if is_on_gpu else _FAST)
    return _CHOICE if was_left_open else ""


def keep_choice(arguments: Namespace, *, before: Mapping[str, Any]) -> None:
    """Give a fit that goes on the choice of its run, whose settings are `before`, as others round differently."""
    _fill_in(arguments, {name: _setting(before, name) for name in (*_FAST, *_FAST_ON_GPU)})


def _fill_in(arguments: Namespace, chosen: Mapping[str, Any]) -> None:
    optimizer, clips = arguments.model.optimizer, arguments.get("trainer.gradient_clip_val")  # not of a fused one
    takes_fused = arguments.trainer.strategy in _FUSED_MODES and optimizer.class_path in _FUSED
    for name, value in chosen.items():
        is_refused = name == _FUSED_FLAG and (not takes_fused or clips or optimizer.init_args.get("foreach"))
        if value is not None and arguments.get(name) is None and not is_refused:
            arguments[name] = value


def _setting(settings: Any, name: str) -> Any:
    for key in name.split("."):
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def check_precision(trainer: Trainer, *, asked: object) -> None:
    """Refuse a precision that Lightning has replaced by another, and warn of one that is slow here."""
    if str(asked).startswith("16") and trainer.precision == "bf16-mixed":
        problem = f"--trainer.precision={asked} needs a GPU, as it scales the loss; here Lightning would take bfloat16"
        raise ConfigError(problem, remedy="pass --trainer.precision=bf16-mixed")
    is_on_cpu = trainer.strategy.root_device.type == "cpu"
    if trainer.precision.startswith("bf16") and is_on_cpu and not cpu_has_bf16():
        where = f"--trainer.precision={asked} on a CPU without instructions for bfloat16"
        rank_zero_warn(f"{where}: a step may take 2 to 30 times as long as with --trainer.precision=32-true")
