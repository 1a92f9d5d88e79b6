"""What a run finds around it: ports, network interfaces, and a launcher's variables."""

import os
import socket

from lit_cifar.errors import ConfigError
from lit_cifar.launch.network_interfaces import LOOPBACK, addresses, loopback_interface
from lit_cifar.launch.rendezvous import cluster_environment, given_port
from lit_cifar.tools.doctor import ALL_MODES, PROCESS_MODES, Check, Finding

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "MASTER_", "SLURM_JOB_ID", "SLURM_NTASKS", "CUDA_", "OMP_NUM_THREADS")


def look_at_environment() -> list[Check]:
    """Everything that a run finds around it."""
    found = [f"{name} {address}" for name, address in addresses().items() if address != LOOPBACK]
    shown = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)]
    variables = " ".join(shown) or "none of NCCL, gloo, CUDA, SLURM or OpenMP is set"
    return [
        Check("interfaces", ", ".join(found) or "loopback only", _loopback()),
        Check("variables", variables, [*_port(), *_launcher()]),
    ]


def _loopback() -> list[Finding]:
    """Whether processes can meet on this machine: a port of the loopback interface, any that is free."""
    try:
        loopback_interface()
        socket.create_server((LOOPBACK, 0)).close()
    except (OSError, StopIteration) as error:
        problem = f"No port can be opened on the loopback interface ({error}): processes cannot meet."
        return [Finding(problem, "ip link set lo up", PROCESS_MODES)]
    return []


def _port() -> list[Finding]:
    """Whether `MASTER_PORT`, if set, is a free port."""
    try:
        port = given_port()
        socket.create_server((LOOPBACK, port)).close()
    except ConfigError as error:
        return [_refused(error, PROCESS_MODES)]
    except OSError as error:
        problem = f"MASTER_PORT={port} cannot be used ({error.strerror}): processes started by hand cannot meet there."
        return [Finding(problem, "unset MASTER_PORT")]
    return []


def _launcher() -> list[Finding]:
    """Whether a run would take itself for a part of another one, or be refused because of the cluster's variables."""
    try:
        cluster_environment()
    except ConfigError as error:
        return [_refused(error, ALL_MODES)]
    given = [name for name in _RANKS if name in os.environ]
    if not set(given) - {"WORLD_SIZE"}:
        return []
    shown = " ".join(f"{name}={os.environ[name]}" for name in given)
    problem = f"{shown} in the environment: a run takes itself for a process that a launcher has started."
    modes = ALL_MODES if any(os.environ[name] != "0" for name in given if name != "WORLD_SIZE") else PROCESS_MODES
    return [Finding(problem, f"unset {' '.join(given)}", modes)]


def _refused(error: ConfigError, modes: tuple[str, ...]) -> Finding:
    """What `fit` would answer."""
    return Finding(f"{error.problem}.", error.remedy, modes)
