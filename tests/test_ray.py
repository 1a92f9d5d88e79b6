"""Runs over two nodes of a Ray cluster: as without Ray, also when a worker is killed or a node is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

import psutil
import pytest
from commands import TINY, callback, end_of, launch, mode_flags, refused
from documents import ROOT
from processes import is_running, wait_until
from recorder import has_reached

from lit_cifar.launch.node import NodeProcesses
from lit_cifar.launch.signals import EXIT_STOPPED

EPOCHS = 3
LONG = [f"--trainer.max_epochs={EPOCHS}", "--last_checkpoint.every_n_steps=2", "--trainer.strategy=ddp"]
LONG += callback("stopping.SlowSteps", seconds=0.7)


def test_without_ray_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'lit-cifar[ray]'" in refused("ray", "fit")


def test_what_processes_print_and_their_end_are_handed_over(tmp_path: Path) -> None:
    node = NodeProcesses()
    place = node.meeting_place(num_nodes=1)
    assert place[0] == "127.0.0.1"
    node.start(["nothing"], folder=str(tmp_path), place=place, node=0, num_nodes=1, num_local=2, restarts=0)
    out, err, statuses = b"", b"", [None]
    while None in statuses:
        statuses, texts = node.poll()
        out, err = out + texts[0], err + texts[1]
        time.sleep(0.1)
    assert (statuses, out) == ([2, 2], b"")
    assert err.count(b"there is no command nothing") == 2


class Cluster(NamedTuple):
    address: str
    environment: dict[str, str]  # that of a job


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The nodes of `ray_cluster`, two to train on and one for each that a test kills."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "GLOO_SOCKET_IFNAME": "lo"}
    command, pipes = [sys.executable, ROOT / "tests" / "ray_cluster.py"], {"stdin": PIPE, "stdout": PIPE}
    program = subprocess.Popen(command, env=environment, text=True, **pipes)
    yield Cluster(program.stdout.readline().strip(), environment)
    program.communicate(timeout=300)


class Job:
    """`python -m lit_cifar ray`, with `own` options, over the cluster's nodes; it writes to `folder`."""

    def __init__(self, cluster: Cluster, folder: Path, *flags: str, own: str = "") -> None:
        self.run = folder / "run"
        self._ids = folder / "ids"
        record = ["--trainer.callbacks+=recorder.RecordIds", f"--trainer.callbacks.folder={self._ids}"]
        ray = ["ray", f"--address={cluster.address}", "--nodes=2", *own.split()]
        words = [*ray, "fit", *TINY, *flags, *record, f"--run_dir={self.run}"]
        self._log = folder / "log"
        self._ids.mkdir()
        command = [sys.executable, "-m", "lit_cifar", *words]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=cluster.environment, stdout=log, stderr=log)

    def status(self) -> int:
        try:
            return self.process.wait(300)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.log()) from None

    def log(self) -> str:
        return self._log.read_text()

    def workers(self) -> dict[int, psutil.Process]:
        """By rank."""
        found = {}
        for process in psutil.process_iter():
            try:
                if f"--run_dir={self.run}" in process.cmdline() and "ray" not in process.cmdline():
                    found[int(process.environ()["RANK"])] = process
            except (psutil.Error, KeyError):
                continue
        return {rank: process for rank, process in found.items() if is_running(process)}

    def wait_for(self, *, step: int) -> None:
        wait_until(lambda: has_reached(self._ids, step) or self.process.poll() is not None, limit_s=250, poll_s=0.2)
        assert has_reached(self._ids, step), self.log()


def wait_for_end(processes: Collection[psutil.Process]) -> None:
    assert wait_until(lambda: not any(map(is_running, processes)), limit_s=60, poll_s=0.2), processes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The end of a run of `LONG` without Ray."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    launch("fit", *TINY, *LONG, "--trainer.devices=2", f"--run_dir={run}", timeout_s=300)
    return end_of(run)


def on_cluster(test: Callable[..., None]) -> Callable[..., None]:
    no_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'lit-cifar[ray]'")
    return no_ray(pytest.mark.slow(pytest.mark.timeout(900)(test)))


@on_cluster
@pytest.mark.parametrize("mode", ["ddp", "pp"])
def test_two_nodes_train_as_two_processes_without_ray(mode: str, cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, f"--trainer.strategy={mode}")
    assert job.status() == 0, job.log()
    assert "result " in job.log()
    other = tmp_path / "other"
    launch("fit", *TINY, *mode_flags(mode), f"--run_dir={other}", timeout_s=300)
    assert end_of(job.run) == end_of(other)


@on_cluster
@pytest.mark.parametrize("killed", ["worker", "node"])
def test_a_kill_costs_no_sample(killed: str, cluster: Cluster, undisturbed: tuple[str, str], tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, *LONG, "--resume=auto", own="--max_failures=1")
    job.wait_for(step=7)
    worker = job.workers()[1]
    node = psutil.Process(int(worker.environ()["RAY_RAYLET_PID"]))
    first, *others = [worker] if killed == "worker" else [node, *node.children(recursive=True)]
    first.kill()
    assert job.status() == 0, job.log()
    wait_for_end(others)
    assert "start 1 of 1 after a failure" in job.log()
    assert end_of(job.run) == undisturbed


@on_cluster
def test_a_stopped_job_saves_and_goes_on_later(cluster: Cluster, undisturbed: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    job = Job(cluster, tmp_path / "first", *LONG)
    job.wait_for(step=7)
    job.process.send_signal(signal.SIGTERM)
    assert job.status() == EXIT_STOPPED, job.log()
    assert job.workers() == {}
    job.run.rename(tmp_path / "run")
    job = Job(cluster, tmp_path, *LONG, "--resume=auto")
    assert job.status() == 0, job.log()
    assert end_of(job.run) == undisturbed


@on_cluster
def test_no_worker_outlives_a_job_that_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, *LONG)
    job.wait_for(step=1)
    workers = job.workers()
    assert sorted(workers) == [0, 1]
    job.process.kill()
    job.process.wait()
    wait_for_end(workers.values())
