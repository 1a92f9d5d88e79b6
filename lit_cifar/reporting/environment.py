"""The environment of a run, as one JSON object: versions, processor, GPUs, parallel layout, command, commit."""

import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_cifar.mode import mode_of
from lit_cifar.version import __version__

_PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "numpy")
SOURCE = Path(__file__).resolve().parents[1]


def environment(trainer: Trainer, *, data_name: str) -> dict[str, Any]:
    """The environment of a run whose processes have started, without names of the machine or its user."""
    found = about()
    found["cpu"]["threads_per_process"] = torch.get_num_threads()
    return found | {
        "data": data_name,
        "strategy": mode_of(trainer.strategy).name,
        "device": trainer.strategy.root_device.type,
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "num_devices": trainer.num_devices * trainer.num_nodes,
        "layout": asdict(mode_of(trainer.strategy).layout),
        "precision": str(trainer.precision),
    }


def about() -> dict[str, Any]:
    """The time, command, versions and hardware, for a record."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "git": git_state(SOURCE),
        "versions": versions(),
        "cpu": {"model": cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def versions() -> dict[str, str]:
    """Python's and the packages' versions, torch's with its build; a package without metadata is left out."""
    found = {"python": platform.python_version(), "lit-cifar": __version__}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found | {"torch": str(torch.__version__), "cuda": torch.version.cuda or "none"}


def cpu_model() -> str:
    """The processor's name; on Arm the kernel says none."""
    found = re.search(r"model name\s*: *(.+)", Path("/proc/cpuinfo").read_text(errors="replace"))
    return found[1] if found else platform.processor() or platform.machine()


def command_line(argv: list[str]) -> str:
    """`argv` as one types it, without the folder that the program lies in."""
    program = Path(argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return " ".join([name, *map(shlex.quote, argv[1:])])


def git_state(package: Path) -> dict[str, Any] | None:
    """Commit of the repository whose top level holds `package`, and whether tracked files differ; None if installed."""
    if not (package.parent / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=package.parent, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, modified = done.stdout.strip().partition("-")
    return {"commit": commit, "modified": bool(modified)}
