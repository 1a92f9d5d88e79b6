"""The place where processes meet that torchrun or `srun` has started."""

import os
import socket
import uuid
from datetime import timedelta
from time import monotonic, sleep

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.launch.addresses import address_of, listen_only_on, loopback_interface, named_interface
from lit_cifar.launch.rendezvous import open_store
from lit_cifar.launch.torchrun import is_task, launcher_name

_PLACE = "lit_cifar/place"  # key of the address of rank 0 in the store of torchrun's agent
_MEETING_TIMEOUT_S = 300.0
# Stores of this process under torchrun: the process group that uses one outlives the Trainer that has opened it.
_KEPT: list[TCPStore] = []


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
            is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            self._place = self._through_agent() if is_shared else self._at_chosen_port()
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
                here = f"{self._interface} ({self._address})"
                problem = f"{launcher_name()} sends the other machines to {address}, which is not {here}"
                flag = "export MASTER_ADDR" if is_task() else "pass torchrun --local-addr"
                raise ConfigError(problem, remedy=f"{flag}={self._address}")
            _KEPT.append(open_store(self._address, port=port, only_there=True))
        return address, port


def _find_store(agent: TCPStore) -> tuple[str, int]:
    """Wait until the address in the agent's store is that of a running rank 0, not of one before the restart."""
    deadline = monotonic() + _MEETING_TIMEOUT_S
    while monotonic() < deadline:
        if agent.check([_PLACE]):
            address, port, token = agent.get(_PLACE).decode().split()
            if _is_kept(address, int(port), token):
                return address, int(port)
        sleep(0.1)
    problem = f"rank 0 did not open its store within {_MEETING_TIMEOUT_S:g} s"
    remedy = "look for its error; if machines join and leave, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
    raise ConfigError(problem, remedy=remedy)


def _is_kept(address: str, port: int, token: str) -> bool:
    """Whether the store at this address is the one with `token`."""
    try:
        # The first attempt is without torch, whose client prints a stack for each attempt that fails.
        socket.create_connection((address, port), timeout=1).close()
        return TCPStore(address, port, wait_for_workers=False, timeout=timedelta(seconds=5)).check([token])
    except (OSError, DistError):
        return False


def _num_machines() -> int:
    return int(os.environ["GROUP_WORLD_SIZE"])
