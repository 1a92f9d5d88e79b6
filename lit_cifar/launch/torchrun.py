"""The variables of torchrun, by which a process knows its place among others, and where these meet.

The tasks of plain `srun python -m lit_cifar fit ...`, one for each device, make them of SLURM's: modes, refusals and
resume are the same under both. Only torchrun starts processes again after a failure; a failed task ends the job step.
"""

import os
import re
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.launch.rendezvous import given_port, listen_only_on, open_store, own_interface

_PLACE = "lit_cifar/place"  # key of the address of rank 0 in the store of torchrun's agent
_MEETING_TIMEOUT_S = default_pg_timeout.total_seconds()  # rank 0 may download the data before
# Stores of this process under torchrun: the process group that uses one outlives the Trainer that has opened it.
_KEPT: list[TCPStore] = []


def task_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun for one of several tasks; none for a single one, as where `srun` starts torchrun.

    The tasks meet on the first machine of the job step, at a port that follows from the numbers of job and step, so
    that steps on one machine have different ones. `MASTER_ADDR` and `MASTER_PORT` say otherwise. The variables:
    https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    num_tasks = slurm.get("SLURM_STEP_NUM_TASKS", "1")  # set by srun only, not in the script of sbatch
    if num_tasks == "1" or "TORCHELASTIC_RUN_ID" in slurm:
        return {}
    first = SLURMEnvironment.resolve_root_node_address(slurm["SLURM_STEP_NODELIST"])
    # Below the ports that Linux gives to clients.
    port = 20_000 + (10 * int(slurm["SLURM_JOB_ID"]) + int(slurm["SLURM_STEP_ID"])) % 10_000
    node = int(slurm["SLURM_NODEID"])
    variables = torchrun_variables(
        (slurm.get("MASTER_ADDR") or first, given_port(slurm) or port),
        local_rank=int(slurm["SLURM_LOCALID"]),
        num_local=_tasks_by_node(slurm["SLURM_STEP_TASKS_PER_NODE"])[node],
        node=node,
        num_nodes=int(slurm["SLURM_STEP_NUM_NODES"]),
        restarts=int(slurm.get("SLURM_RESTART_COUNT", 0)),
    )
    return variables | {"RANK": slurm["SLURM_PROCID"], "WORLD_SIZE": num_tasks}


def torchrun_variables(
    place: tuple[str, int], *, local_rank: int, num_local: int, node: int = 0, num_nodes: int = 1, restarts: int = 0
) -> dict[str, str]:
    """The environment variables that torchrun gives a rank, where rank 0 is to open the store at `place`."""
    variables = {
        "MASTER_ADDR": place[0],
        "MASTER_PORT": place[1],
        "RANK": node * num_local + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": num_nodes * num_local,
        "LOCAL_WORLD_SIZE": num_local,
        "GROUP_WORLD_SIZE": num_nodes,
        "GROUP_RANK": node,
        "TORCHELASTIC_RUN_ID": "lit-cifar",
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return {name: str(value) for name, value in variables.items()}


def _tasks_by_node(text: str) -> list[int]:
    """The number of tasks on each machine: `2(x3),1` is three machines with two and one with one."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, machines in groups for _ in range(int(machines or 1))]


class TorchrunEnvironment(TorchElasticEnvironment):
    """Processes that torchrun starts, again after each failure: rank 0 opens a new store every time.

    torchrun would let them use its agent's store. That store survives a restart and then still holds the addresses of
    terminated processes; a process that reads one of those waits forever. Here the agent's store only serves to find
    the new one. With `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` there is none, and torchrun chooses a port each time.
    """

    def __init__(self) -> None:
        self._interface, self._address = own_interface(num_machines=_num_machines())
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
            found = ""
            with suppress(OSError):  # nobody knows the name here
                found = socket.gethostbyname(address)
            if found != self._address:
                here = f"{self._interface} ({self._address})"
                problem = f"torchrun or srun sends the other machines to {address}, which is not {here}"
                remedy = f"pass torchrun --local-addr={self._address}, or export MASTER_ADDR={self._address} for srun"
                raise ConfigError(problem, remedy=remedy)
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
