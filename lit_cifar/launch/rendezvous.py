"""The place where the processes of a run meet, and the network interface on which they listen.

A process group opens up to three kinds of ports: the store of rank 0, through which the processes find each other, and
the listeners of gloo and NCCL. None of them asks who is calling, and torch opens the first on every interface. Here all
ports are on the loopback interface if a run has one machine, and else on the interface that the user names.

Lightning reads an environment's `main_address` and `main_port` in each process right before it calls
`torch.distributed.init_process_group`. At that moment our environments open the store, or find it.
"""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lit_cifar.errors import ConfigError, one_line

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"
_LAST_PORT = 65535


class LocalEnvironment(LightningEnvironment):
    """Processes that Lightning starts on this machine; the one that starts them keeps the store."""

    def __init__(self) -> None:
        super().__init__()
        self._store: TCPStore | None = None
        self._keeper: int | None = None
        self._port: int | None = None
        self._timeout = default_pg_timeout

    @property
    @override
    def main_address(self) -> str:
        """The loopback address; asking for it readies this process to listen there only."""
        listen_only_on(LOOPBACK_INTERFACE)
        if self._keeper not in (None, os.getpid()):
            # The variable tells torch that rank 0 is a client too: the store belongs to the parent.
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        return LOOPBACK

    @property
    @override
    def main_port(self) -> int:
        """The store's port, open from then on: Lightning's own search would close it until the processes start."""
        if self._port is None:
            self._port = self._open() if self.local_rank() == 0 else given_port()
        if self.creates_processes_externally and self.world_size() > 1:
            self._meet(self._port)
        return self._port

    def check(self, *, timeout: timedelta | None) -> None:
        """Refuse processes that were started by hand without a port at which they meet; they will wait for so long."""
        self._timeout = default_pg_timeout if timeout is None else timeout
        if not given_port() and self.creates_processes_externally:
            problem = f"LOCAL_RANK={self.local_rank()} in the environment, but MASTER_PORT does not say where to meet"
            raise ConfigError(problem, remedy="unset LOCAL_RANK RANK WORLD_SIZE, or export MASTER_PORT=29500 for all")

    def _open(self) -> int:
        wanted = given_port()
        # Processes that are started by hand are all given the same port.
        self._store = open_store(LOOPBACK, port=wanted, only_there=wanted > 0 and self.creates_processes_externally)
        self._keeper = os.getpid()
        if wanted not in (0, self._store.port):
            rank_zero_info(f"port {wanted} is in use: the processes meet at port {self._store.port} instead")
        return int(self._store.port)

    def _meet(self, port: int) -> None:
        end = time.monotonic() + self._timeout.total_seconds()
        while self._store is None and time.monotonic() < end:
            time.sleep(0.02)
            with suppress(OSError):  # torch prints a stack for each attempt that fails
                socket.create_connection((LOOPBACK, port), timeout=1).close()
                self._store = TCPStore(LOOPBACK, port, wait_for_workers=False, timeout=2 * self._timeout)
        if absent := "0" if self._store is None else self._absent(self._store, end):
            time.sleep(1.0)  # until all have read it from the store, which ends with rank 0
            raise SystemExit(f"lit_cifar: rank {absent} of {self.world_size()} has not come within {self._timeout}")

    def _absent(self, store: TCPStore, end: float) -> str:
        """The ranks that have not come, as rank 0 tells all; "" when all are here. torch would not say which."""
        store.set(f"here/{self.global_rank()}", "")
        if self.global_rank() == 0:
            absent = [*range(self.world_size())]
            while (absent := [rank for rank in absent if not store.check([f"here/{rank}"])]) and time.monotonic() < end:
                time.sleep(0.02)
            store.set("absent", ", ".join(map(str, absent)))
        return store.get("absent").decode()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the store, which stays in the process that opened it."""
        return {**self.__dict__, "_store": None}


def open_store(address: str, *, port: int = 0, only_there: bool = False) -> TCPStore:
    """Open a store in this process that listens at `address` (IPv4) alone.

    If `port` is 0 or in use the store takes a free one. With `only_there` a port in use is an error.
    """
    try:
        listener = socket.create_server((address, port))
    except OSError as error:
        if only_there:
            problem = f"the processes cannot meet at {address}:{port}: {error.strerror}"
            raise ConfigError(problem, remedy="start them again, with another MASTER_PORT if one is set") from error
        listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    # Multi-tenant: the TCPStore that torch will make for rank 0 in this process takes this one's server.
    fd = listener.detach()
    try:
        return TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)
    except DistNetworkError as error:
        problem = f"the processes cannot meet at {address}: {one_line(error)[:150]}"
        raise ConfigError(problem, remedy="start its network interface, as by `ip link set lo up`") from error


def given_port(variables: Mapping[str, str] = os.environ) -> int:
    """The port in `MASTER_PORT`; 0 if it is not set."""
    text = variables.get("MASTER_PORT") or "0"
    if not text.isdecimal() or int(text) > _LAST_PORT:
        problem = f"MASTER_PORT={text} in the environment is not a port"
        raise ConfigError(problem, remedy="unset MASTER_PORT, or export MASTER_PORT=29500")
    return int(text)


def listen_only_on(interface: str) -> None:
    """Bind the ports that gloo and NCCL open in this process from now on to `interface`.

    On several machines NCCL may use more than one interface: `NCCL_SOCKET_IFNAME` is kept if it is set.
    """
    exactly = f"={interface}"  # NCCL takes a name alone as a prefix: eth1 would match eth10
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if interface == LOOPBACK_INTERFACE:
        os.environ["NCCL_SOCKET_IFNAME"] = exactly
    else:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", exactly)


def own_interface(*, num_machines: int) -> tuple[str, str]:
    """The interface on which the processes of this machine listen, and its IPv4 address.

    With several machines `GLOO_SOCKET_IFNAME` must name it.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if num_machines == 1 or name == LOOPBACK_INTERFACE:
        return LOOPBACK_INTERFACE, LOOPBACK
    import psutil  # a run on one machine does without

    found = psutil.net_if_addrs().items()
    ipv4 = {name: [entry.address for entry in entries if entry.family == socket.AF_INET] for name, entries in found}
    addresses = {name: own[0] for name, own in ipv4.items() if own and own[0] != LOOPBACK}
    if name is None or name not in addresses:
        problem = f"several machines need an interface, and GLOO_SOCKET_IFNAME={name or ''} is not one of this machine"
        known = ", ".join(f"{name} ({address})" for name, address in addresses.items()) or "none with an IPv4 address"
        raise ConfigError(problem, remedy=f"export GLOO_SOCKET_IFNAME=NAME on every machine; this one has {known}")
    return name, addresses[name]
