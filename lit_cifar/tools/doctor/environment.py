"""What a run finds around it: ports, network interfaces, a launcher's variables, and the clock."""

import os
import socket
from collections.abc import Callable
from functools import partial
from time import monotonic, time

from lit_cifar.errors import ConfigError
from lit_cifar.launch.network_interfaces import LOOPBACK, address_of, addresses, loopback_interface, named_interface
from lit_cifar.launch.rendezvous import cluster_environment, given_port
from lit_cifar.tools.doctor import ALL_MODES, PROCESS_MODES, Check, Finding

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "MASTER_", "SLURM_JOB_ID", "SLURM_NTASKS", "CUDA_", "OMP_NUM_THREADS")
_CLOCK_S = 1.0
_finding = partial(Finding, "environment")


class Clock:
    """Watches the wall clock from its making on."""

    def __init__(self) -> None:
        self._offset_s = time() - monotonic()

    def check(self) -> list[Finding]:
        """Whether it was set meanwhile."""
        moved = time() - monotonic() - self._offset_s
        if abs(moved) < _CLOCK_S:
            return []
        problem = f"The clock was set by {moved:+.0f} s during the check: times in logs will be wrong."
        return [_finding(problem, "timedatectl set-ntp true")]


def look_at_environment() -> list[Check]:
    """Everything that a run finds around it."""
    found = [f"{name} {address}" for name, address in addresses().items() if address != LOOPBACK]
    shown = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)]
    variables = " ".join(shown) or "none of NCCL, gloo, CUDA, SLURM or OpenMP is set"
    return [
        Check("interfaces", ", ".join(found) or "loopback only", [*check_loopback(), *check_interface()]),
        Check("variables", variables, [*check_port(), *check_launcher()]),
    ]


def check_loopback(open_port: Callable[[tuple[str, int]], socket.socket] = socket.create_server) -> list[Finding]:
    """Whether processes can meet on this machine: a port of the loopback interface, any that is free."""
    try:
        loopback_interface()
        open_port((LOOPBACK, 0)).close()
    except (OSError, StopIteration) as error:
        problem = f"No port can be opened on the loopback interface ({error}): processes cannot meet."
        return [_finding(problem, "ip link set lo up", PROCESS_MODES)]
    return []


def check_port() -> list[Finding]:
    """Whether `MASTER_PORT`, if set, is a free port."""
    try:
        port = given_port()
        socket.create_server((LOOPBACK, port)).close()
    except ConfigError as error:
        return [_refused(error, PROCESS_MODES)]
    except OSError as error:
        problem = f"MASTER_PORT={port} cannot be used ({error.strerror}): processes started by hand cannot meet there."
        return [_finding(problem, "unset MASTER_PORT")]
    return []


def check_launcher() -> list[Finding]:
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
    return [_finding(problem, f"unset {' '.join(given)}", modes)]


def check_interface() -> list[Finding]:
    """Whether the interface for several machines, if one is named, exists; one machine does not use it."""
    try:
        if "GLOO_SOCKET_IFNAME" in os.environ:
            address_of(named_interface())
    except ConfigError as error:
        return [_refused(error, ())]
    return []


def _refused(error: ConfigError, modes: tuple[str, ...]) -> Finding:
    """What `fit` would answer."""
    return _finding(f"{error.problem}.", error.remedy, modes)
