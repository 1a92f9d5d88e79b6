"""Tasks of plain `srun`: what they are told, what is refused, and that two train as two processes do without it.

`slurm.sh`, by which SLURM starts torchrun instead, is in `test_configs`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import TINY, callback, end_of, launch, mode_flags
from documents import ROOT

from lit_cifar.errors import ConfigError
from lit_cifar.launch.signals import EXIT_STOPPED
from lit_cifar.launch.torchrun import task_variables
from lit_cifar.launch.world_size import cluster_environment

# As `srun --nodes=2 --ntasks-per-node=2` of SLURM 22.05 sets them for the last of four tasks.
TASK = {
    **{"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "python", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "3"},
    **{"SLURM_STEP_NODELIST": "node[3-4]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"},
}


def test_a_task_is_told_what_torchrun_would_tell_it() -> None:
    assert task_variables(TASK) == {
        **{"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1"},
        **{"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "node3", "MASTER_PORT": "27113"},
        "TORCHELASTIC_RUN_ID": "lit-cifar",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"SLURM_STEP_ID": "4"}, {"MASTER_PORT": "27114"}),  # another step of the same job
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "500"}, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "500"}),
        ({"SLURM_STEP_NODELIST": "gpu7,node[3-4]"}, {"MASTER_ADDR": "gpu7"}),
        ({"SLURM_RESTART_COUNT": "2"}, {"TORCHELASTIC_RESTART_COUNT": "2"}),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, {"LOCAL_WORLD_SIZE": "1"}),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2(x3),4", "SLURM_NODEID": "4"}, {"LOCAL_WORLD_SIZE": "4"}),
    ],
)
def test_what_differs_is_told(given: dict[str, str], told: dict[str, str]) -> None:
    found = task_variables(TASK | given)
    assert {name: found[name] for name in told} == told


@pytest.mark.parametrize(
    "given",
    [
        {},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_NTASKS": "4"},  # the script of sbatch, where the job's variables are set, but none of a step
        {**TASK, "TORCHELASTIC_RUN_ID": "4711"},  # a process of a torchrun that srun has started
    ],
)
def test_who_is_not_one_of_several_tasks_is_told_nothing(given: dict[str, str]) -> None:
    assert task_variables(given) == {}


@pytest.mark.parametrize("first", ["127.0.0.2", "no such name"])
def test_a_first_machine_by_another_interface_is_refused(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a task becomes, which is a process of torchrun though SLURM's variables are there too."""
    settings = {"RANK": "0", "MASTER_ADDR": first, "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**TASK, **task_variables(TASK), **settings}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"srun sends the other machines to {first}(.|\n)*export MASTER_ADDR=127"):
        _ = cluster_environment().main_port


def tasks(run: Path, *flags: str) -> list[int]:
    """The exit statuses of two tasks on this machine, which are started here with SLURM's variables."""
    slurm = TASK | {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    slurm |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    environment = {**os.environ, **slurm, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "lit_cifar", "fit", *TINY, f"--run_dir={run}", *flags]
    environments = [{**environment, "SLURM_PROCID": task, "SLURM_LOCALID": task} for task in "01"]
    started = [subprocess.Popen(command, env=own) for own in environments]
    return [task.wait(200) for task in started]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "devices"), [("ddp", 2), ("ddp_mp", 4), ("pp", 2), ("fsdp2", 2), ("tp", 2)])
def test_two_tasks_that_resume_train_as_two_processes_without_srun(mode: str, devices: int, tmp_path: Path) -> None:
    """They are stopped as by `scancel`, or at the end of their time."""
    flags = [f"--trainer.strategy={mode}", "--last_checkpoint.every_n_steps=2"]  # at which they agree
    assert tasks(tmp_path / "srun", *flags, *callback("stopping.SignalAfter", step=2, rank=1)) == [EXIT_STOPPED] * 2
    assert tasks(tmp_path / "srun", *flags, "--resume=auto") == [0, 0]
    launch("fit", *TINY, *mode_flags(mode, devices), f"--run_dir={tmp_path / 'other'}", timeout_s=200)
    assert end_of(tmp_path / "srun") == end_of(tmp_path / "other")
