"""The place where the processes of a run meet, and the network interface on which they listen.

A process group opens up to three kinds of ports: the store of rank 0, through which the processes find each other, and
the listeners of gloo and NCCL. None of them asks who is calling, and torch opens the first on every interface. Here all
ports are on the loopback interface if a run has one machine, and on the interface that the user names if it has
several.

Lightning reads an environment's `main_address` and `main_port` in each process right before it calls
`torch.distributed.init_process_group`. At that moment the environments below open the store, or find it.
"""

import os
import socket
import uuid
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.launch.network_interfaces import (
    LOOPBACK,
    address_of,
    listen_only_on,
    loopback_interface,
    named_interface,
)
from lit_cifar.launch.torchrun import is_task, launcher_name

_PLACE = "lit_cifar/place"  # key of the address of rank 0 in the store of torchrun's agent
_MEETING_TIMEOUT_S = 300.0
_LAST_PORT = 65535
# Stores of this process under torchrun: the process group that uses one outlives the Trainer that has opened it.
_KEPT: list[TCPStore] = []


def cluster_environment(*, num_nodes: int = 1) -> ClusterEnvironment:
    """The plugin for `Trainer(plugins=[...])` by which the processes meet where other machines cannot connect."""
    if TorchElasticEnvironment.detect():
        return TorchrunEnvironment()
    num_tasks = _num_cluster_tasks()
    if num_tasks > 1:
        raise ConfigError(
            f"a cluster has {num_tasks} tasks for this job, and this process does not train together with others",
            remedy="srun python -m lit_cifar fit, a task for each device; or configs/cluster/slurm.sh; for one process "
            "srun --ntasks=1; in a shell of salloc's: export SLURM_JOB_NAME=bash",
        )
    if num_nodes > 1:
        raise ConfigError(
            f"--trainer.num_nodes={num_nodes}, but the processes were not started by torchrun",
            remedy="start torchrun on each machine: see configs/cluster/torchrun.sh",
        )
    return LocalEnvironment()


class LocalEnvironment(LightningEnvironment):
    """Processes that Lightning starts on this machine; the one that starts them keeps the store."""

    def __init__(self) -> None:
        super().__init__()
        self._store: TCPStore | None = None
        self._keeper: int | None = None
        self._port: int | None = None

    @property
    @override
    def main_address(self) -> str:
        """The loopback address; asking for it readies this process to listen there only."""
        listen_only_on(loopback_interface())
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
        return self._port

    def check(self) -> None:
        """Refuse processes that were started by hand without a port at which they meet."""
        if not given_port() and self.creates_processes_externally:
            raise ConfigError(
                f"LOCAL_RANK={self.local_rank()} in the environment: each process was started by hand, but MASTER_PORT "
                "does not say where they meet",
                remedy="unset LOCAL_RANK RANK WORLD_SIZE, or export MASTER_PORT=29500 for all of them",
            )

    def _open(self) -> int:
        wanted = given_port()
        # Processes that are started by hand are all given the same port.
        self._store = open_store(LOOPBACK, port=wanted, only_there=wanted > 0 and self.creates_processes_externally)
        self._keeper = os.getpid()
        if wanted not in (0, self._store.port):
            rank_zero_info(f"port {wanted} is in use: the processes meet at port {self._store.port} instead")
        return int(self._store.port)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the store, which stays in the process that opened it."""
        return {**self.__dict__, "_store": None}


class TorchrunEnvironment(TorchElasticEnvironment):
    """Processes that torchrun starts, again after each failure: rank 0 opens a new store every time.

    torchrun would let them use its agent's store. That store survives a restart and then still holds the addresses of
    terminated processes; a process that reads one of those waits forever. Here the agent's store only serves to find
    the new one. Under `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` there is no agent's store, and torchrun chooses a port for
    each start.
    """

    def __init__(self) -> None:
        self._interface = named_interface() if _num_machines() > 1 else loopback_interface()
        self._address = address_of(self._interface)
        self._place: tuple[str, int] | None = None

    @property
    @override
    def main_address(self) -> str:
        """Address of the store of rank 0; asking for it readies this process to listen on its interface only."""
        listen_only_on(self._interface)
        return self._meet()[0]

    @property
    @override
    def main_port(self) -> int:
        return self._meet()[1]

    def _meet(self) -> tuple[str, int]:
        if self._place is None:
            shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            self._place = self._through_agent() if shared else self._at_chosen_port()
        return self._place

    def _through_agent(self) -> tuple[str, int]:
        agent = TCPStore(super().main_address, super().main_port, is_master=False, wait_for_workers=False)
        if self.global_rank() != 0:
            return _find_store(agent)
        store = open_store(self._address)
        _KEPT.append(store)
        token = uuid.uuid4().hex
        store.set(token, "")
        agent.set(_PLACE, f"{self._address} {store.port} {token}")
        return self._address, store.port

    def _at_chosen_port(self) -> tuple[str, int]:
        address, port = super().main_address, super().main_port
        if _num_machines() == 1:
            address = self._address
        if self.global_rank() == 0:
            if socket.gethostbyname(address) != self._address:
                raise ConfigError(
                    f"{launcher_name()} sends the other machines to {address}, which is not {self._interface} "
                    f"({self._address})",
                    remedy=f"export MASTER_ADDR={self._address} for all tasks"
                    if is_task()
                    else f"pass torchrun --local-addr={self._address}",
                )
            _KEPT.append(open_store(self._address, port=port, only_there=True))
        return address, port


def open_store(address: str, *, port: int = 0, only_there: bool = False) -> TCPStore:
    """Open a store in this process that listens at `address` (IPv4) alone.

    If `port` is 0 or in use the store takes a free one. With `only_there` a port in use is an error.
    """
    try:
        listener = socket.create_server((address, port))
    except OSError as error:
        if only_there:
            raise ConfigError(
                f"the processes cannot meet at {address}:{port}: {error.strerror}",
                remedy="start them again, with another MASTER_PORT if you have set one",
            ) from error
        listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    # Multi-tenant: the TCPStore that torch will make for rank 0 in this process takes this one's server.
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


def _find_store(agent: TCPStore) -> tuple[str, int]:
    """Wait until the address in the agent's store is that of a running rank 0, not of one before the restart."""
    deadline = monotonic() + _MEETING_TIMEOUT_S
    while monotonic() < deadline:
        if agent.check([_PLACE]):
            address, port, token = agent.get(_PLACE).decode().split()
            if _is_kept(address, int(port), token):
                return address, int(port)
        sleep(0.1)
    raise ConfigError(
        f"rank 0 did not open its store within {_MEETING_TIMEOUT_S:g} s",
        remedy="look for its error; if machines join and leave, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun",
    )


def _is_kept(address: str, port: int, token: str) -> bool:
    """Whether the store at this address is the one with `token`."""
    try:
        # The first attempt is without torch, whose client prints a stack for each attempt that fails.
        socket.create_connection((address, port), timeout=1).close()
        timeout = timedelta(seconds=5)
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return store.check([token])
    except (OSError, DistError):
        return False


def given_port() -> int:
    """The port in `MASTER_PORT`; 0 if it is not set."""
    text = os.environ.get("MASTER_PORT", "0")
    if not text.isdecimal() or int(text) > _LAST_PORT:
        raise ConfigError(
            f"MASTER_PORT={text} in the environment is not a port",
            remedy="unset MASTER_PORT, or export MASTER_PORT=29500",
        )
    return int(text)


def _num_cluster_tasks() -> int:
    """Number of tasks of a scheduler's job; 1 without a scheduler."""
    if SLURMEnvironment.detect():
        return int(os.environ["SLURM_NTASKS"])  # Lightning's class might refuse the job
    others = (kind for kind in (LSFEnvironment, MPIEnvironment) if kind.detect())
    return max((kind().world_size() for kind in others), default=1)


def _num_machines() -> int:
    return int(os.environ["GROUP_WORLD_SIZE"])
