"""Jobs on a SLURM cluster of two nodes: `slurm.sh`, and plain `srun`."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import TINY, callback, end_of, launch, mode_flags
from machines import two_machines
from processes import wait_until
from recorder import has_reached
from slurm_cluster import NODES, Cluster, why_not

from lit_cifar.launch.signals import EXIT_STOPPED

SCRIPT = "configs/cluster/slurm.sh"
EPOCHS = 3
FLAGS = [*TINY, "--trainer.strategy=ddp", f"--trainer.max_epochs={EPOCHS}", "--last_checkpoint.every_n_steps=2"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("slurm")]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "slurm").mkdir()
    with two_machines() as machines:
        yield Cluster(tmp_path / "slurm", machines)


class Job:
    """`slurm.sh` on both nodes, one process on each, which writes to `folder`. A step takes at least `step_s`."""

    def __init__(self, slurm: Cluster, folder: Path, *options: str, step_s: float) -> None:
        self._slurm, self.run, self.log, self._ids = slurm, folder / "run", folder / "log", folder / "ids"
        self._ids.mkdir()
        record = callback("recorder.RecordIds", folder=self._ids)
        slow = callback("stopping.SlowSteps", seconds=step_s)
        sizes = ["--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={self.log}"]
        words = ["sbatch", "--parsable", *sizes, *options, SCRIPT, *FLAGS, *record, *slow, f"--run_dir={self.run}"]
        settings = {"INTERFACE": "eth0", "NPROC": "1", "LAST_CALL_S": "8", "DEAD_AFTER_S": "6"}
        self.number = slurm.run(*words, **settings).strip()

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        held = wait_until(holds, limit_s=400, poll_s=0.5)
        assert held, f"not {what}: {self.state()}\n{self.said()}\n{self._slurm.logs()}"

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: has_reached(self._ids, step), f"at step {step}")

    def wait_for_end(self, state: str) -> None:
        self.wait_for(lambda: self.state() == state, state)

    def state(self) -> str:
        return self._slurm.state(self.number)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The end of the same run on two processes of this machine."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    launch("fit", *FLAGS, "--trainer.devices=2", f"--run_dir={run}", timeout_s=300)
    return end_of(run)


def test_a_job_is_queued_again_before_its_time_is_up(
    slurm: Cluster, undisturbed: tuple[str, str], tmp_path: Path
) -> None:
    """Its time becomes short while it trains, so that the test does not depend on the speed of the machine."""
    job = Job(slurm, tmp_path, "--time=60", "--signal=B:USR1@540", step_s=6)
    job.wait_for_step(2)
    slurm.run("scontrol", "update", f"jobid={job.number}", "timelimit=10")  # now the signal is due
    job.wait_for_end("PENDING")
    slurm.run("scontrol", "update", f"jobid={job.number}", "timelimit=60")
    job.wait_for_end("COMPLETED")
    assert "stopped by SIGTERM after" in job.said()
    assert "resuming" in job.said()
    assert end_of(job.run) == undisturbed


def test_a_cancelled_job_ends_and_does_not_come_back(slurm: Cluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "--time=10", step_s=1)
    job.wait_for_step(3)
    slurm.run("scancel", job.number)
    job.wait_for_end("CANCELLED")
    job.wait_for(lambda: slurm.num_idle() == len(NODES), "free nodes")
    assert job.state() == "CANCELLED"
    assert "stopped by SIGTERM after" in job.said()  # and saved


def test_the_rest_goes_on_when_a_node_is_lost(slurm: Cluster, undisturbed: tuple[str, str], tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "--time=10", step_s=1)
    job.wait_for_step(4)
    slurm.machines[1].kill_all()
    job.wait_for_end("COMPLETED")
    assert end_of(job.run)[1] == undisturbed[1]


def srun(slurm: Cluster, folder: Path, name: str, *flags: str) -> subprocess.Popen[bytes]:
    time = ["--time=60", "--signal=TERM@540"]
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", *time, "python", "-m", "lit_cifar", "fit", *FLAGS, *flags]
    return slurm.start(*words, f"--run_dir={folder / 'run'}", log=folder / name, GLOO_SOCKET_IFNAME="eth0")


@pytest.mark.parametrize("stop", [["scancel", "1"], ["scontrol", "update", "jobid=1", "timelimit=10"]])
def test_plain_srun_saves_when_it_is_cancelled_or_its_time_is_up_and_resumes(
    stop: list[str], slurm: Cluster, undisturbed: tuple[str, str], tmp_path: Path
) -> None:
    """One task on each node; the first job is stopped in the middle of an epoch."""
    (tmp_path / "ids").mkdir()
    record = callback("recorder.RecordIds", folder=tmp_path / "ids")
    stopped = srun(slurm, tmp_path, "stopped", *record, *callback("stopping.SlowSteps", seconds=4))
    got_on = wait_until(lambda: has_reached(tmp_path / "ids", 2), limit_s=200, poll_s=0.2)
    assert got_on, (tmp_path / "stopped").read_text() + slurm.logs()
    slurm.run(*stop)
    assert stopped.wait(120) == EXIT_STOPPED, (tmp_path / "stopped").read_text()
    assert "stopped by SIGTERM after" in (tmp_path / "stopped").read_text()
    resumed = srun(slurm, tmp_path, "resumed", "--resume=auto")
    assert resumed.wait(200) == 0, (tmp_path / "resumed").read_text()
    assert "resuming" in (tmp_path / "resumed").read_text()
    assert end_of(tmp_path / "run") == undisturbed


def test_several_tasks_on_each_node(slurm: Cluster, tmp_path: Path) -> None:
    words = ["srun", "--nodes=2", "--ntasks-per-node=2", "python", "-m", "lit_cifar", "fit", *TINY]
    flags = ["--trainer.strategy=ddp_pp", f"--run_dir={tmp_path / 'run'}"]
    job = slurm.start(*words, *flags, log=tmp_path / "log", GLOO_SOCKET_IFNAME="eth0")
    assert job.wait(300) == 0, (tmp_path / "log").read_text()
    launch("fit", *TINY, *mode_flags("ddp_pp", 4), f"--run_dir={tmp_path / 'same'}", timeout_s=300)
    assert end_of(tmp_path / "run") == end_of(tmp_path / "same")
