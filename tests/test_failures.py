"""What fails or is killed leaves nothing behind: no process (see `conftest.py`), no open port, no temporary file."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import FIT, TINY, callback, graded, mode_flags
from processes import is_running, marked, wait_until

from lit_cifar.checks.watchdog.monitor import BEAT_S
from lit_cifar.launch.forked import ForkedRun

LONG = ["--trainer.max_epochs=1000", "--trainer.check_val_every_n_epoch=1000"]
LONG += callback("stopping.SlowSteps", seconds=0.1)  # which leaves the processor to others
MODES = {mode: mode_flags(mode) for mode in ("ddp", "ddp_spawn", "pp")}
MODES["ddp_pp"] = mode_flags("PipelineStrategy", 4, num_stages=2)


@pytest.mark.parametrize("number", graded(slow=[signal.SIGINT], exhaustive=[signal.SIGTERM]))
def test_verify_that_is_stopped_takes_its_runs_with_it(number: signal.Signals, tmp_path: Path) -> None:
    """And its temporary files."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = ["verify", "--modes=ddp", "--model.arch=resnet10", "--model.stem=imagenet"]
    command, null = [sys.executable, "-m", "lit_cifar", *words], subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdout=null, stderr=null) as process:
        assert wait_until(lambda: len(marked(tmp_path)) >= 3, limit_s=100, poll_s=0.1)  # the first run begins
        time.sleep(1.0)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert wait_until(lambda: not marked(tmp_path), limit_s=10, poll_s=0.1)
    assert not list(tmp_path.iterdir())


class Run:
    """A training that goes on until something ends it.

    Args:
        folder: Where it writes; each rank its pid, in `rank<r>`.
        flags: Of `fit`.
        num_ranks: How many there are to be.
    """

    def __init__(self, folder: Path, *flags: str, num_ranks: int) -> None:
        pids = callback("recorder.WritePids", folder=folder)
        words = ["fit", *TINY, *LONG, f"--run_dir={folder / 'run'}", *flags, *pids]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        self._stderr = folder / "stderr"
        self._run = ForkedRun(words, **FIT, environment=environment, stdout=folder / "stdout", stderr=self._stderr)
        self._folder, self._num_ranks = folder, num_ranks
        self._all: list[psutil.Process] = []

    def pids(self) -> list[int]:
        """Of the ranks, once each has done a step."""
        files = [self._folder / f"rank{rank}" for rank in range(self._num_ranks)]
        while not all(file.exists() for file in files):
            assert self._run.wait(0.1) is None, self._stderr.read_text()
        (self.first,) = map(psutil.Process, self._run.pids)
        self._all = [self.first, *self.first.children(recursive=True)]
        return [int(file.read_text()) for file in files]

    def wait(self, timeout_s: float) -> str:
        """What it has written on stderr, once nothing of it is running, which must come about in time."""
        ended = wait_until(lambda: not any(map(is_running, self._all)), limit_s=timeout_s, poll_s=0.1)
        assert ended, f"still running: {self._all}\n{self._stderr.read_text()}"
        return self._stderr.read_text()

    def status(self) -> int | None:
        """The exit status of the process that the user has started."""
        return self._run.wait(5)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing, whatever happened."""
        self._run.kill()


def told(stderr: str) -> str:
    """The watchdog's message; there is exactly one."""
    pattern = r"^lit_cifar: (?:rank|no rank) .*?^lit_cifar: (?:all|the other) processes stop$"
    messages = re.findall(pattern, stderr, re.DOTALL | re.MULTILINE)
    assert len(messages) == 1, stderr
    return str(messages[0])


# A third of the usual time for a process that is stopped; and an end of those that hang, long before torch gives up.
SOON, IMPATIENT = "--watchdog.timeout_s=6", "--watchdog.hang_timeout_s=15"


@pytest.mark.parametrize(
    ("number", "mode", "rank"),
    graded(
        (signal.SIGKILL, "ddp", 0),
        slow=[*((signal.SIGKILL, mode, 1) for mode in ("ddp", "ddp_spawn", "pp")), (signal.SIGSTOP, "ddp", 0)],
        exhaustive=[
            *((signal.SIGKILL, mode, 0) for mode in ("ddp_spawn", "pp")),
            *((signal.SIGKILL, "ddp_pp", rank) for rank in range(4)),
        ],
    ),
)
def test_a_lost_rank_is_named_and_the_others_end(number: signal.Signals, mode: str, rank: int, tmp_path: Path) -> None:
    soon = [SOON] if number == signal.SIGSTOP else []
    with Run(tmp_path, *MODES[mode], *soon, num_ranks=4 if mode == "ddp_pp" else 2) as run:
        pid = run.pids()[rank]
        time.sleep(2.5 * BEAT_S)  # until its heartbeats are read
        os.kill(pid, number)
        message = told(run.wait(30))
    assert f"rank {rank} (pid {pid} on {socket.gethostname()})" in message
    assert re.search(r"after \d+ optimizer steps, at \S+\.py:\d+ ", message)
    assert number.name in message
    assert run.status() in (1, -signal.SIGKILL)


@pytest.mark.parametrize(("mode", "rank"), graded(slow=[("ddp_spawn", 0)], exhaustive=[("ddp", 1), ("pp", 0)]))
def test_a_main_thread_that_hangs_is_found_and_shown(mode: str, rank: int, tmp_path: Path) -> None:
    hanging = callback("recorder.HangOn", rank=rank, step=8)
    with Run(tmp_path, *MODES[mode], IMPATIENT, *hanging, num_ranks=2) as run:
        pid = run.pids()[rank]
        message = told(run.wait(60))
    assert message.startswith("lit_cifar: no rank has got on for ")
    assert re.search(rf"rank {rank} \(pid {pid} on {socket.gethostname()}\) has been for .*recorder\.py", message)
    assert run.status() == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_before_all_have_met_is_named(tmp_path: Path) -> None:
    killed = "import os\nif 'LOCAL_RANK' in os.environ:\n    os.kill(os.getpid(), 9)"
    (tmp_path / "sitecustomize.py").write_text(killed)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}"}
    command = [sys.executable, "-m", "lit_cifar", "fit", *TINY, *MODES["ddp"], f"--run_dir={tmp_path / 'run'}"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert re.search(r"^lit_cifar: rank 1 has ended: SIGKILL; all", run.stderr, flags=re.MULTILINE)
    assert "Traceback" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_never_started_is_named(rank: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:  # whose port is free a moment later
        place = {"MASTER_PORT": str(probe.getsockname()[1]), "LOCAL_RANK": str(rank)}
    words = ["fit", *TINY, *mode_flags("DDPStrategy", 2, timeout="0:00:02"), f"--run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "lit_cifar", *words]
    run = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True)
    assert run.returncode == 1
    assert f"lit_cifar: rank {1 - rank} of 2 has not come within 0:00:02\n" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_no_spawned_rank_outlives_its_parent(tmp_path: Path) -> None:
    """Which holds the lock of the run folder, so that the same command may come again."""
    with Run(tmp_path, *MODES["ddp_spawn"], num_ranks=2) as run:
        run.pids()
        run.first.kill()
        run.wait(10)


@pytest.mark.parametrize("mode", graded(slow=["ddp", "pp"], exhaustive=["ddp_spawn"]))
def test_an_exception_is_told_by_one_traceback(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    failing = callback("recorder.FailOn", rank=1, step=3)
    with Run(tmp_path, *MODES[mode], *failing, num_ranks=2) as run:
        run.pids()
        stderr = run.wait(30)
        assert run.status() == 1
    message = told(stderr)
    assert "rank 1 (pid" in message
    assert "failed; after 3 optimizer steps\n" in message
    assert message.splitlines()[-2].strip() == "RuntimeError: rank 1 fails at step 3"
    assert "Connection" not in stderr  # the other rank's error, which followed from it
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert [name for name in left if not name.startswith("pytorch-errorfile-")] == []  # which torch's spawn leaves
    assert wait_until(lambda: not marked(tmp_path), limit_s=10, poll_s=0.1)  # and so no open port
