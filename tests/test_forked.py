"""Processes forked from one that has imported the package: the right environment, status and end."""

import os
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread

import psutil
import pytest
from processes import is_running, wait_until

from lit_cifar.launch import forked
from lit_cifar.launch.forked import ForkedRun, _rank_environments


def start(folder: Path, program: str, *, num_ranks: int = 1) -> ForkedRun:
    """Run `program`, text of Python, with its output in the files `out` and `err`."""
    (folder / "program.py").write_text(program)
    streams = {"stdout": folder / "out", "stderr": folder / "err"}
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return ForkedRun([], environment=environment, num_ranks=num_ranks, module="program", **streams)


def test_an_exit_status_is_not_read_while_another_process_starts(tmp_path: Path) -> None:
    """To start one asks for the exit codes of all, and each can be read once: who comes second would find 255."""
    run, statuses = start(tmp_path, ""), []
    waiting = Thread(target=lambda: statuses.append(run.wait(100)))
    with forked._starting:
        waiting.start()
        wait([process.sentinel for process in run._processes])
        waiting.join(0.3)
        assert statuses == []
    waiting.join()
    assert statuses == [0]


@pytest.mark.slow
def test_a_run_ends_with_the_process_that_has_started_it_though_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    owner = (
        "import os, sys, time; from pathlib import Path; from lit_cifar.launch.forked import ForkedRun; "
        "folder = Path(sys.argv[1]); streams = {'stdout': folder / 'out', 'stderr': folder / 'err'}; "
        "environment = os.environ | {'PYTHONPATH': str(folder)}; "
        "run = ForkedRun([], environment=environment, num_ranks=2, module='program', **streams); time.sleep(600)"
    )
    (tmp_path / "out").touch()
    with subprocess.Popen([sys.executable, "-c", owner, str(tmp_path)]) as starter:
        assert wait_until(lambda: len((tmp_path / "out").read_text().split()) == 2, limit_s=60)
        ranks = [psutil.Process(int(pid)) for pid in (tmp_path / "out").read_text().split()]
        starter.kill()
    psutil.wait_procs(ranks, timeout=10)
    assert not any(map(is_running, ranks))


def test_one_failing_rank_ends_the_others_with_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 hangs, where nobody watches it."""
    monkeypatch.setattr(forked, "_FAREWELL_S", 0.5)
    program = "import os, time\nif os.environ['RANK'] == '1': raise RuntimeError('of rank 1')\ntime.sleep(600)\n"
    run = start(tmp_path, program, num_ranks=2)
    status = run.wait(100)
    run.kill()
    assert status == 1
    assert "RuntimeError: of rank 1" in (tmp_path / "err").read_text()


@pytest.mark.slow
def test_a_run_past_its_time_has_no_status_and_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\nsleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(sleep).pid, flush=True)\ntime.sleep(600)\n"
    )
    run = start(tmp_path, program)
    while not (tmp_path / "out").exists() or not (tmp_path / "out").read_text().endswith("\n"):
        time.sleep(0.05)
    processes = [psutil.Process(pid) for pid in (*run.pids, int((tmp_path / "out").read_text()))]
    assert run.wait(0.1) is None
    run.kill()
    psutil.wait_procs(processes, timeout=10)
    assert not [process for process in processes if is_running(process)]


def test_ranks_meet_at_a_port_that_nobody_else_gets() -> None:
    with _rank_environments({"A": "1"}, 2) as first, _rank_environments({}, 2) as second:
        assert [own["RANK"] for own in first] == [own["LOCAL_RANK"] for own in first] == ["0", "1"]
        assert {own["MASTER_PORT"] for own in first} != {own["MASTER_PORT"] for own in second}
        assert all(own["A"] == "1" and own["WORLD_SIZE"] == "2" for own in first)
