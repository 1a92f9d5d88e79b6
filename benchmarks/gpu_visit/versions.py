"""Prints, as JSON, what a visit runs on: `python -m gpu_visit.versions`."""

import json
import os
import platform
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import lit_cifar

PACKAGES = (
    *(
        "torch",
        "torchvision",
        "lightning",
        "torchmetrics",
        "tensorboard",
        "jsonargparse",
        "matplotlib",
        "numpy",
        "rich",
    ),
    *("pillow", "pyyaml", "typing-extensions", "psutil", "triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"),
    *("pytest", "pytest-timeout", "pytest-xdist"),
)


def about() -> dict[str, object]:
    """Versions, hardware and limits."""
    found: dict[str, object] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "lit_cifar": str(Path(lit_cifar.__file__).parent),
        "shared memory, GB": _free_gb("/dev/shm"),
        "temporary files, GB": _free_gb(tempfile.gettempdir()),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | _of_gpu()


def _free_gb(folder: str) -> float:
    return round(shutil.disk_usage(folder).free / 1e9, 1) if Path(folder).is_dir() else 0.0


def _of_gpu() -> dict[str, object]:
    if not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "gpu": properties.name,
        "gpu memory, GB": round(properties.total_memory / 1e9, 1),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
    }


if __name__ == "__main__":
    print(json.dumps(about()))
