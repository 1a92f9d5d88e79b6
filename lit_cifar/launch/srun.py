"""The tasks of plain `srun python -m lit_cifar fit ...`, one for each device.

SLURM's variables become those of torchrun, so that modes, refusals and resume are the same under both. Only torchrun
starts processes again after a failure; a failed task ends the job step.
"""

import os
import re
from collections.abc import Mapping

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lit_cifar.launch.node import torchrun_variables

SRUN = "srun"  # in place of torchrun's name of a run
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below those that Linux gives to clients


def adopt_task() -> None:
    """Let this process be what torchrun would have started, if it is one of several tasks of `srun`."""
    os.environ.update(task_variables(os.environ))


def is_task() -> bool:
    """Whether `srun` has started this process as one of several."""
    return os.environ.get("TORCHELASTIC_RUN_ID") == SRUN


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
    port = _FIRST_PORT + (10 * int(slurm["SLURM_JOB_ID"]) + int(slurm["SLURM_STEP_ID"])) % _NUM_PORTS
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


def _tasks_by_node(text: str) -> list[int]:
    """The number of tasks on each machine: `2(x3),1` is three machines with two and one with one."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, machines in groups for _ in range(int(machines or 1))]
