"""What the machine has: processor, GPUs, memory, disk, and versions that must match."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from lit_cifar.reporting.environment import PACKAGES, cpu_model, versions
from lit_cifar.tools.doctor import ALL_MODES, Check, Finding, size_of
from lit_cifar.tools.doctor.links import Ask, ask_nvidia_smi, driver_gpus, driver_version

_SHM = Path("/dev/shm")
_SHM_NEEDED = 2**27  # `ddp_spawn` hands the network over in it; a container has 2**26 unless asked for more
_DISK_NEEDED = 2**29  # three checkpoints of the default network: the best, the last, and the one that is being written
_finding = partial(Finding, "machine")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that torch sees."""

    name: str  # its model
    capability: tuple[int, int] = (0, 0)  # e.g. (9, 0)
    free: int = 0  # bytes of its memory that no process uses
    total: int = 0
    error: str = ""  # why it cannot be used

    @classmethod
    def at(cls, index: int) -> "Gpu":
        """The one of that index in torch."""
        try:
            free, total = torch.cuda.mem_get_info(index)
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        except RuntimeError as error:
            return cls(name="not usable", error=str(error).splitlines()[0])
        return cls(name=name, capability=capability, free=free, total=total)

    @property
    def free_of_total(self) -> str:
        """E.g. "57.6 GiB of 64 GiB"."""
        return f"{size_of(self.free)} of {size_of(self.total)}"


def look_at_machine(gpus: Sequence[Gpu], *, folder: Path, ask: Ask = ask_nvidia_smi) -> list[Check]:
    """Everything of the machine that needs no measurement; runs are written to `folder`."""
    memory, found, disk = psutil.virtual_memory(), versions(), existing(folder)
    shown = ", ".join(f"{name} {found[name]}" for name in ("python", *PACKAGES) if name in found)
    return [
        Check("processor", f"{cpu_model()}, {os.cpu_count()} cores"),
        Check("memory", f"{size_of(memory.available)} of {size_of(memory.total)} free"),
        *check_gpus(gpus, torch.cuda.get_arch_list() if gpus else []),
        Check("versions", shown, check_versions(found)),
        check_driver(driver_version(ask), found["cuda"], gpus, num_driver_gpus=len(driver_gpus(ask))),
        *([check_shared_memory(shutil.disk_usage(_SHM).free)] if _SHM.exists() else []),
        check_disk(disk, shutil.disk_usage(disk).free, is_writable=os.access(disk, os.W_OK)),
    ]


def check_versions(
    installed: Mapping[str, str], requirements: Callable[[str], Iterable[str] | None] = metadata.requires
) -> list[Finding]:
    """Packages that need another version of each other than the `installed` one, as torchvision of torch."""
    findings = []
    for package in (package for package in PACKAGES if package in installed):
        for need in map(Requirement, requirements(package) or ()):
            version = installed.get(need.name)
            # Without the name of the build, as in 2.11.0+cu130.
            if version and need.marker is None and not need.specifier.contains(Version(version).public, True):
                made_for = f"{package} {installed[package]} was made for {need.name}{need.specifier}"
                problem = f"{made_for}, and {need.name} {version} is installed."
                findings.append(_finding(problem, f"pip install --upgrade {need.name} {package}", ALL_MODES))
    return findings


def check_driver(driver: tuple[str, str] | None, cuda: str, gpus: Sequence[Gpu], *, num_driver_gpus: int) -> Check:
    """GPUs that the driver knows and torch, which was built with `cuda`, cannot use.

    `driver` is its version and that of the newest CUDA that it runs.
    """
    if driver is None:
        return Check("CUDA", f"torch is built with {cuda}, and there is no driver")
    findings = [_unused_gpus(driver, cuda)] if num_driver_gpus and not gpus else []
    return Check("CUDA", f"torch is built with {cuda}, driver {driver[0]} runs up to {driver[1]}", findings)


def _unused_gpus(driver: tuple[str, str], cuda: str) -> Finding:
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        problem = f"CUDA_VISIBLE_DEVICES={hidden} hides every GPU: modes run on the CPU."
        return _finding(problem, "unset CUDA_VISIBLE_DEVICES")
    choose = f"https://pytorch.org/get-started/locally   # choose a build for CUDA {driver[1]}"
    if cuda == "none":
        return _finding("This torch is built without CUDA, and the driver sees GPUs.", choose, ALL_MODES)
    if Version(cuda).major > Version(driver[1]).major:
        problem = f"torch is built with CUDA {cuda}, and driver {driver[0]} runs CUDA {driver[1]} at most."
        return _finding(problem, f"{choose}, or install a newer driver", ALL_MODES)
    mend = "python -c 'import torch; torch.zeros(1).cuda()'   # shows why"
    return _finding("The driver sees GPUs, and torch sees none.", mend, ALL_MODES)


def check_gpus(gpus: Sequence[Gpu], architectures: Sequence[str]) -> list[Check]:
    """Each GPU that torch sees, which was built for `architectures`, as "sm_80"."""
    checks = [
        Check(f"GPU {index}", f"{gpu.name}, {gpu.free_of_total} free", _check_gpu(index, gpu, architectures))
        for index, gpu in enumerate(gpus)
    ]
    if len({gpu.name for gpu in gpus if not gpu.error}) > 1:
        mend = "export CUDA_VISIBLE_DEVICES=...   # with those of one model"
        mixed = _finding("The GPUs are of different models: every step waits for the slowest.", mend)
        checks.append(Check("GPUs", "of different models", [mixed]))
    return checks or [Check("GPUs", "none")]


def _check_gpu(index: int, gpu: Gpu, architectures: Sequence[str]) -> list[Finding]:
    """Whether torch can use it and has code for it, and whether others use it."""
    if gpu.error:
        return [_finding(f"GPU {index} cannot be used: {gpu.error}.", "nvidia-smi   # shows more", ALL_MODES)]
    findings = []
    if not runs_on(gpu.capability, architectures):
        problem = f"This torch has no code for GPU {index}, {gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})."
        mend = "https://pytorch.org/get-started/locally   # choose a build that has it"
        findings.append(_finding(problem, mend, ALL_MODES))
    if gpu.free < gpu.total / 2:
        problem = f"Of GPU {index} {gpu.free_of_total} are free: other processes use the rest."
        findings.append(_finding(problem, "nvidia-smi   # shows which"))
    return findings


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether code for one of the architectures runs on a GPU: of the same major version, or compiled at the start."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        made_for = int(digits[:-1]), int(digits[-1])
        if made_for <= capability and (kind == "compute" or made_for[0] == capability[0]):
            return True
    return False


def check_shared_memory(free: int) -> Check:
    """Too little of it for `ddp_spawn`; what NCCL needs is tried by the ranks."""
    problem = f"{_SHM} has {size_of(free)} free: ddp_spawn hands the network to its processes in it."
    little = _finding(problem, "docker run --shm-size=1g ...", ("ddp_spawn",))
    return Check("shared memory", f"{size_of(free)} free in {_SHM}", [little] if free < _SHM_NEEDED else [])


def check_disk(folder: Path, free: int, *, is_writable: bool) -> Check:
    """Too little of it for the checkpoints of a run, or none that can be written."""
    reason = f"has {size_of(free)} free, too little for checkpoints" if is_writable else "cannot be written"
    mend = "python -m lit_cifar fit --run_dir=/ANOTHER/DISK/run"
    is_enough = is_writable and free >= _DISK_NEEDED
    findings = [] if is_enough else [_finding(f"{folder} {reason}.", mend, ALL_MODES)]
    return Check("disk", f"{size_of(free)} free in {folder}", findings)


def existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
