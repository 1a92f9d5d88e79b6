"""Processes forked from one that has imported the package: the right environment, status and end."""

import os
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread

import psutil
from commands import TINY, launch, mode_flags

from lit_cifar import __version__
from lit_cifar.tools import forked
from lit_cifar.tools.forked import ForkedRun, _rank_environments


def start(words: list[str], folder: Path, *, num_ranks: int = 1) -> ForkedRun:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    return ForkedRun(words, environment=environment, stdout=folder / "out", stderr=folder / "err", num_ranks=num_ranks)


def test_status_and_streams_are_those_of_the_command_line() -> None:
    assert __version__ in launch("--version").stdout
    refused = launch("fitt", check=False)
    assert (refused.status, refused.stdout) == (2, "")
    assert "there is no command fitt" in refused.stderr


def test_an_exit_status_is_not_read_while_another_process_starts(tmp_path: Path) -> None:
    """To start one asks for the exit codes of all, and each can be read once: who comes second would find 255."""
    run, statuses = start(["--version"], tmp_path), []
    waiting = Thread(target=lambda: statuses.append(run.wait(100)))
    with forked._starting:
        waiting.start()
        wait([process.sentinel for process in run._processes])
        waiting.join(0.3)
        assert statuses == []
    waiting.join()
    assert statuses == [0]


def test_one_failing_rank_ends_the_others_with_its_status(tmp_path: Path) -> None:
    """Rank 0 hangs in the second step, where nobody watches it."""
    words = ["fit", *TINY, *mode_flags("ddp"), "--watchdog.timeout_s=0", f"--run_dir={tmp_path / 'run'}"]
    words += ["--trainer.callbacks+=recorder.HangOn", "--trainer.callbacks.rank=0", "--trainer.callbacks.step=1"]
    words += ["--trainer.callbacks+=recorder.FailOn", "--trainer.callbacks.rank=1", "--trainer.callbacks.step=1"]
    run = start(words, tmp_path, num_ranks=2)
    status = run.wait(100)
    run.kill()
    assert status == 1
    assert "rank 1 fails at step 1" in (tmp_path / "err").read_text()


def test_a_run_past_its_time_has_no_status_and_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    """It launches its second rank itself, which belongs to its session."""
    (tmp_path / "pids").mkdir()
    words = ["fit", *TINY, *mode_flags("ddp"), f"--run_dir={tmp_path / 'run'}"]
    words += ["--trainer.callbacks+=recorder.WritePids", f"--trainer.callbacks.folder={tmp_path / 'pids'}"]
    words += ["--trainer.callbacks+=recorder.HangOn", "--trainer.callbacks.rank=0", "--trainer.callbacks.step=2"]
    run = start(words, tmp_path)
    deadline = time.monotonic() + 100
    while len(list((tmp_path / "pids").glob("rank*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.wait(0.1) is None
    processes = [psutil.Process(int(path.read_text())) for path in (tmp_path / "pids").glob("rank*")]
    run.kill()
    assert len(processes) == 2
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_ranks_meet_at_a_port_that_nobody_else_gets() -> None:
    with _rank_environments({"A": "1"}, 2) as first, _rank_environments({}, 2) as second:
        assert [own["RANK"] for own in first] == [own["LOCAL_RANK"] for own in first] == ["0", "1"]
        assert {own["MASTER_PORT"] for own in first} != {own["MASTER_PORT"] for own in second}
        assert all(own["A"] == "1" and own["WORLD_SIZE"] == "2" for own in first)


def test_temporary_files_may_lie_deep(tmp_path: Path) -> None:
    """Deeper than the path of a socket may be long; in a process of its own, as a fork server stays."""
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    program = (
        "import sys, tempfile; from lit_cifar.tools.forked import start_forked; "
        "process = start_forked(sys.exit, (7,)); process.join(); print(process.exitcode, tempfile.gettempdir())"
    )
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["7", str(folder)], done.stderr
