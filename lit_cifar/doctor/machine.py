"""What the machine has: processor, GPUs, memory, disk, and versions that must match."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from lit_cifar.doctor.findings import ALL_MODES, Finding
from lit_cifar.doctor.nvidia_smi import Ask, ask_nvidia_smi, driver_gpus, driver_version
from lit_cifar.reporting.environment import PACKAGES, cpu_model, versions

_GIB = 2**30
_SHM = Path("/dev/shm")
_SHM_NEEDED = 2**27  # `ddp_spawn` hands the network over in it; a container has 2**26 unless asked for more
_DISK_NEEDED = 2**29  # three checkpoints of the default network: the best, the last, and the one that is being written
Facts = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that torch sees.

    Attributes:
        name: Its model.
        capability: E.g. (9, 0).
        free: Bytes of its memory that no process uses.
        total: Bytes of its memory.
        error: Why it cannot be used, "" if it can.
    """

    name: str
    capability: tuple[int, int] = (0, 0)
    free: int = 0
    total: int = 0
    error: str = ""


def find_gpus() -> list[Gpu]:
    """Those that torch sees."""
    return [_find_gpu(index) for index in range(torch.cuda.device_count())]


def _find_gpu(index: int) -> Gpu:
    try:
        free, total = torch.cuda.mem_get_info(index)
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    except RuntimeError as error:
        return Gpu(name="not usable", error=str(error).splitlines()[0])
    return Gpu(name=name, capability=capability, free=free, total=total)


def look_at_machine(gpus: Sequence[Gpu], *, folder: Path, ask: Ask = ask_nvidia_smi) -> tuple[Facts, list[Finding]]:
    """Facts to print, and what is wrong.

    Args:
        gpus: Those that torch sees.
        folder: Where runs are written.
        ask: `nvidia-smi`.
    """
    driver = driver_version(ask)
    disk = existing(folder)
    memory, free_disk = psutil.virtual_memory(), shutil.disk_usage(disk).free
    found = versions()
    facts = [("processor", f"{cpu_model()}, {os.cpu_count()} cores")]
    facts += [("memory", f"{_gib(memory.available)} of {_gib(memory.total)} free")]
    facts += [(f"GPU {index}", _of_gpu(gpu)) for index, gpu in enumerate(gpus)] or [("GPUs", "none")]
    facts += [("versions", ", ".join(f"{name} {found[name]}" for name in ("python", *PACKAGES) if name in found))]
    facts += [("CUDA", f"torch is built with {found['cuda']}, " + _of_driver(driver))]
    findings = check_versions(found) + check_driver(driver, found["cuda"], gpus, num_driver_gpus=len(driver_gpus(ask)))
    findings += check_gpus(gpus, torch.cuda.get_arch_list() if gpus else [])
    if _SHM.exists():
        free = shutil.disk_usage(_SHM).free
        facts.append(("shared memory", f"{_gib(free)} free in {_SHM}"))
        findings += check_shared_memory(free)
    facts.append(("disk", f"{_gib(free_disk)} free in {disk}"))
    return facts, findings + check_disk(disk, free_disk, is_writable=os.access(disk, os.W_OK))


def check_versions(
    installed: Mapping[str, str], requirements: Callable[[str], Iterable[str] | None] = metadata.requires
) -> list[Finding]:
    """Packages that need another version of each other than the installed one, as torchvision of torch.

    Args:
        installed: Versions by package.
        requirements: Of a package, as its metadata have them.
    """
    findings = []
    for package in PACKAGES:
        needs = [Requirement(text) for text in (requirements(package) or ()) if package in installed]
        for need in needs:
            version = installed.get(need.name)
            if version is None or need.marker is not None or need.specifier.contains(_public(version), True):
                continue
            findings.append(
                Finding(
                    part="machine",
                    problem=f"{package} {installed[package]} was made for {need.name}{need.specifier}, and "
                    f"{need.name} {version} is installed.",
                    mend=f"pip install --upgrade {need.name} {package}",
                    modes=ALL_MODES,
                )
            )
    return findings


def check_driver(
    driver: tuple[str, str] | None, cuda: str, gpus: Sequence[Gpu], *, num_driver_gpus: int
) -> list[Finding]:
    """GPUs that the driver knows and torch cannot use.

    Args:
        driver: Version of the driver, and of the newest CUDA that it runs.
        cuda: The CUDA that torch was built with, or "none".
        gpus: Those that torch sees.
        num_driver_gpus: Number of those that the driver sees.
    """
    if driver is None or not num_driver_gpus or gpus:
        return []
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        problem = f"CUDA_VISIBLE_DEVICES={hidden} hides every GPU: modes run on the CPU."
        return [Finding(part="machine", problem=problem, mend="unset CUDA_VISIBLE_DEVICES")]
    choose = f"https://pytorch.org/get-started/locally   # choose a build for CUDA {driver[1]}"
    if cuda == "none":
        problem = "This torch is built without CUDA, and the driver sees GPUs."
        mend = choose
    elif Version(cuda).major > Version(driver[1]).major:
        problem = f"torch is built with CUDA {cuda}, and driver {driver[0]} runs CUDA {driver[1]} at most."
        mend = f"{choose}, or install a newer driver"
    else:
        problem = "The driver sees GPUs, and torch sees none."
        mend = "python -c 'import torch; torch.zeros(1).cuda()'   # shows why"
    return [Finding(part="machine", problem=problem, mend=mend, modes=ALL_MODES)]


def check_gpus(gpus: Sequence[Gpu], architectures: Sequence[str]) -> list[Finding]:
    """GPUs for which torch has no code, which others use, or which differ.

    Args:
        gpus: Those that torch sees.
        architectures: That torch was built for, as "sm_80".
    """
    findings = []
    for index, gpu in enumerate(gpus):
        if gpu.error:
            problem = f"GPU {index} cannot be used: {gpu.error}."
            findings.append(Finding(part="machine", problem=problem, mend="nvidia-smi   # shows more", modes=ALL_MODES))
            continue
        if not runs_on(gpu.capability, architectures):
            problem = f"This torch has no code for GPU {index}, {gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})."
            mend = "https://pytorch.org/get-started/locally   # choose a build that has it"
            findings.append(Finding(part="machine", problem=problem, mend=mend, modes=ALL_MODES))
        if gpu.free < gpu.total / 2:
            problem = f"Of GPU {index} {_gib(gpu.free)} of {_gib(gpu.total)} are free: other processes use the rest."
            findings.append(Finding(part="machine", problem=problem, mend="nvidia-smi   # shows which"))
    if len({gpu.name for gpu in gpus if not gpu.error}) > 1:
        problem = "The GPUs are of different models: every step waits for the slowest."
        mend = "export CUDA_VISIBLE_DEVICES=...   # with those of one model"
        findings.append(Finding(part="machine", problem=problem, mend=mend))
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


def check_shared_memory(free: int) -> list[Finding]:
    """Too little of it for `ddp_spawn`; what NCCL needs is tried by the ranks."""
    if free >= _SHM_NEEDED:
        return []
    problem = f"{_SHM} has {free / 2**20:.0f} MiB free: ddp_spawn hands the network to its processes in it."
    return [Finding(part="machine", problem=problem, mend="docker run --shm-size=1g ...", modes=("ddp_spawn",))]


def check_disk(folder: Path, free: int, *, is_writable: bool) -> list[Finding]:
    """Too little of it for the checkpoints of a run, or none that can be written."""
    if is_writable and free >= _DISK_NEEDED:
        return []
    reason = f"has {free / 2**20:.0f} MiB free, too little for checkpoints" if is_writable else "cannot be written"
    mend = "python -m lit_cifar fit --run_dir=/ANOTHER/DISK/run"
    return [Finding(part="machine", problem=f"{folder} {reason}.", mend=mend, modes=ALL_MODES)]


def existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _of_gpu(gpu: Gpu) -> str:
    return f"{gpu.name}, {_gib(gpu.free)} of {_gib(gpu.total)} free"


def _of_driver(driver: tuple[str, str] | None) -> str:
    return "and there is no driver" if driver is None else f"driver {driver[0]} runs up to {driver[1]}"


def _public(version: str) -> str:
    """Without the name of the build, as in 2.11.0+cu130."""
    return Version(version).public


def _gib(number: int) -> str:
    return f"{number / _GIB:.3g} GiB"
