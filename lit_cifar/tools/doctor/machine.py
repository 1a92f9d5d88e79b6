"""Checks of the machine, with its GPUs and the copies between them, and of the environment of a run."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil
import torch

from lit_cifar import internals
from lit_cifar.errors import ConfigError
from lit_cifar.launch.network_interfaces import LOOPBACK, addresses, loopback_interface
from lit_cifar.launch.rendezvous import cluster_environment, given_port
from lit_cifar.launch.srun import task_variables
from lit_cifar.reporting.environment import PACKAGES, cpu_model, versions
from lit_cifar.strategies.device_copies import copy_faults
from lit_cifar.tools.doctor import ALL_MODES, COPY_MODES, PROCESS_MODES, Check, MachineFinding, size_of

_SHM = Path("/dev/shm")
_SHM_NEEDED = 2**27  # `ddp_spawn` hands over the network in shared memory; a container's default is 2**26
_DISK_NEEDED = 2**29  # three checkpoints of the default network: the best, the last, and the one that is being written
_MEND_COPIES = (
    "turn off the IOMMU or PCIe ACS in the BIOS, or boot with iommu=pt   # or use ddp, see docs/troubleshooting.md"
)

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "MASTER_", "SLURM_JOB_ID", "SLURM_NTASKS", "CUDA_", "OMP_NUM_THREADS")


def look_at_machine(*, folder: Path) -> list[Check]:
    """Checks of the machine that need no measurement; runs are written to `folder`."""
    memory, found = psutil.virtual_memory(), versions()
    shown = ", ".join(f"{name} {found[name]}" for name in ("python", *PACKAGES) if name in found)
    return [
        Check("processor", f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores"),
        Check("memory", f"{size_of(memory.available)} of {size_of(memory.total)} free"),
        *(map(check_gpu, range(torch.cuda.device_count())) if torch.cuda.device_count() else [check_no_gpus()]),
        *check_mig(),
        Check("versions", shown),
        check_internals(),
        *([check_shared_memory(shutil.disk_usage(_SHM).free)] if _SHM.exists() else []),
        check_disk(folder),
    ]


def ask_nvidia_smi(*arguments: str) -> str:
    """The output of `nvidia-smi`; "" without a driver."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def check_gpu(index: int) -> Check:
    name = f"GPU {index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        model = torch.cuda.get_device_name(index)
        torch.ones(1, device=f"cuda:{index}").item()  # runs a kernel: this torch may lack one for the GPU
    except RuntimeError as error:
        problem = f"{name} cannot be used: {str(error).splitlines()[0]}."
        return Check(name, "not usable", [MachineFinding(problem, "nvidia-smi   # shows more", ALL_MODES)])
    seen = f"{size_of(free)} of {size_of(total)}"
    busy = MachineFinding(f"Of {name} {seen} are free: other processes use the rest.", "nvidia-smi   # shows which")
    return Check(name, f"{model}, {seen} free", [busy] if free < total / 2 else [])


def check_internals() -> Check:
    """Names inside torch and Lightning that a release may have changed, and the modes that need them."""
    modes = {f"--trainer.strategy={name}": (name,) for name in ALL_MODES} | {internals.RUN: ALL_MODES}
    modes[internals.MODES] = tuple(name for name in ALL_MODES if name not in ("single", "ddp", "ddp_spawn"))
    absent = [(error, modes.get(needs, ())) for needs in internals.NAMES for error in internals.missing(needs)]
    findings = [MachineFinding(f"{error.problem}.", error.remedy, needed_by) for error, needed_by in absent]
    count = len({(place, name) for place, name, _ in internals.each()})
    of = f"names inside torch {torch.__version__} and Lightning {metadata.version('lightning')}"
    seen = f"{len(findings)} of {count} {of} missing" if findings else f"all {count} {of} found"
    return Check("internals", seen, findings)


def check_mig() -> list[Check]:
    """Whether GPUs are divided into MIG instances. CUDA gives a process one (NVIDIA's MIG User Guide)."""
    instances = re.findall(r"MIG (\S+) .*UUID: (MIG-[^)\s]+)", ask_nvidia_smi("-L"))
    if not instances:
        return []
    problem = f"A process sees one of {len(instances)} MIG instances: no run can divide its work among several."
    mend = f"CUDA_VISIBLE_DEVICES={instances[0][1]} python -m lit_cifar fit   # a run for each instance, without a mode"
    return [Check("MIG", ", ".join(profile for profile, _ in instances), [MachineFinding(problem, mend)])]


def check_no_gpus() -> Check:
    """Whether the driver knows GPUs where torch sees none."""
    gpus = ask_nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader")
    if not gpus:
        return Check("GPUs", "none")
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        problem = f"CUDA_VISIBLE_DEVICES={hidden} hides every GPU: modes run on the CPU."
        return Check("GPUs", gpus, [MachineFinding(problem, "unset CUDA_VISIBLE_DEVICES")])
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it does not say why"
    except (RuntimeError, AssertionError) as error:  # the driver is too old, or torch lacks CUDA
        reason = str(error).splitlines()[0]
    problem = f"The driver sees GPUs, and torch sees none: {reason.removesuffix('.')}."
    mend = "https://pytorch.org/get-started/locally   # choose a build for this driver, or install a newer driver"
    return Check("GPUs", gpus, [MachineFinding(problem, mend, ALL_MODES)])


def check_shared_memory(free: int) -> Check:
    """Whether shared memory suffices for `ddp_spawn`; the ranks try what NCCL needs."""
    problem = f"{_SHM} has {size_of(free)} free: ddp_spawn hands the network to other processes in it."
    little = MachineFinding(problem, "docker run --shm-size=1g ...", ("ddp_spawn",))
    return Check("shared memory", f"{size_of(free)} free in {_SHM}", [little] if free < _SHM_NEEDED else [])


def check_disk(folder: Path) -> Check:
    """Whether the disk suffices for a run's checkpoints and can be written; `folder` need not exist yet."""
    folder = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free, is_writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
    reason = f"has {size_of(free)} free, too little for checkpoints" if is_writable else "cannot be written"
    little = MachineFinding(f"{folder} {reason}.", "python -m lit_cifar fit --run_dir=/ANOTHER/DISK/run", ALL_MODES)
    is_enough = is_writable and free >= _DISK_NEEDED
    return Check("disk", f"{size_of(free)} free in {folder}", [] if is_enough else [little])


def check_copies(devices: Sequence[torch.device]) -> Check:
    """Copy between every ordered pair of GPUs, as before `dp`, `mp` and `ddp_mp` train."""
    if len(devices) < 2:
        return Check("GPU to GPU", f"not tried: that needs two GPUs, and torch sees {len(devices) or 'none'}")
    try:
        faults = copy_faults(devices)
    except RuntimeError as error:
        problem = f"Copies between devices could not be tried: {str(error).splitlines()[0]}."
        return Check("GPU to GPU", "not tried", [MachineFinding(problem, "nvidia-smi", COPY_MODES)])
    num_pairs = len(devices) * (len(devices) - 1)
    if not faults:
        return Check("GPU to GPU", f"all of {num_pairs} ordered pairs copied every byte")
    seen = f"faults in {len(faults)} of {num_pairs} ordered pairs"
    pairs = ", ".join(f"{source} to {destination}" for source, destination in faults)
    problem = f"Copies between devices do not arrive ({pairs}): {next(iter(faults.values()))}."
    return Check("GPU to GPU", seen, [MachineFinding(problem, _MEND_COPIES, COPY_MODES)])


def look_at_environment() -> list[Check]:
    found = [f"{name} {address}" for name, address in addresses().items() if address != LOOPBACK]
    shown = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)]
    variables = " ".join(shown) or "none of NCCL, gloo, CUDA, SLURM or OpenMP is set"
    return [
        Check("interfaces", ", ".join(found) or "loopback only", _loopback()),
        Check("variables", variables, [*_port(), *_launcher()]),
    ]


def _loopback() -> list[MachineFinding]:
    """Whether processes can meet on this machine: a port of the loopback interface, any that is free."""
    try:
        loopback_interface()
        socket.create_server((LOOPBACK, 0)).close()
    except (OSError, StopIteration) as error:
        problem = f"No port can be opened on the loopback interface ({error}): processes cannot meet."
        return [MachineFinding(problem, "ip link set lo up", PROCESS_MODES)]
    return []


def _port() -> list[MachineFinding]:
    try:
        port = given_port()
        socket.create_server((LOOPBACK, port)).close()
    except ConfigError as error:
        return [MachineFinding(f"{error.problem}.", error.remedy, PROCESS_MODES)]
    except OSError as error:
        problem = f"MASTER_PORT={port} cannot be used ({error.strerror}): processes started by hand cannot meet there."
        return [MachineFinding(problem, "unset MASTER_PORT")]
    return []


def _launcher() -> list[MachineFinding]:
    """Whether a run would take itself for a part of another run, or the cluster's variables would refuse it."""
    if task_variables(os.environ):
        return []  # `srun` has started this process, and `fit` would train as one of its tasks
    try:
        cluster_environment()
    except ConfigError as error:
        return [MachineFinding(f"{error.problem}.", error.remedy, ALL_MODES)]  # the answer of `fit`
    given = [name for name in _RANKS if name in os.environ]
    if not set(given) - {"WORLD_SIZE"}:
        return []
    shown = " ".join(f"{name}={os.environ[name]}" for name in given)
    problem = f"{shown} in the environment: a run takes itself for a process that a launcher has started."
    modes = ALL_MODES if any(os.environ[name] != "0" for name in given if name != "WORLD_SIZE") else PROCESS_MODES
    return [MachineFinding(problem, f"unset {' '.join(given)}", modes)]
