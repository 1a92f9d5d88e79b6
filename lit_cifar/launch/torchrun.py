"""The variables of torchrun, by which a process knows its place among others.

The tasks of plain `srun python -m lit_cifar fit ...`, one for each device, make them of SLURM's: modes, refusals and
resume are the same under both. Only torchrun starts processes again after a failure; a failed task ends the job step.
"""

import os
import re
from collections.abc import Mapping

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

SRUN = "srun"  # in place of torchrun's name of a run


def is_task() -> bool:
    """Whether `srun` has started this process as one of several."""
    return os.environ.get("TORCHELASTIC_RUN_ID") == SRUN


def launcher_name() -> str:
    return "srun" if is_task() else "torchrun"


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
        (slurm.get("MASTER_ADDR") or first, int(slurm.get("MASTER_PORT") or port)),
        local_rank=int(slurm["SLURM_LOCALID"]),
        num_local=_tasks_by_node(slurm["SLURM_STEP_TASKS_PER_NODE"])[node],
        node=node,
        num_nodes=int(slurm["SLURM_STEP_NUM_NODES"]),
        restarts=int(slurm.get("SLURM_RESTART_COUNT", 0)),
    )
    return variables | {"RANK": slurm["SLURM_PROCID"], "WORLD_SIZE": num_tasks, "TORCHELASTIC_RUN_ID": SRUN}


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
