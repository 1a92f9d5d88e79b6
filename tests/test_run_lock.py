"""One run at a time in a run folder, and a folder of its own for each run."""

import errno
import fcntl
import os
import socket
import time
from datetime import datetime
from pathlib import Path

import pytest
from commands import TINY, run_here

from lit_cifar.reporting import run_folder
from lit_cifar.reporting.run_folder import LOCK, RunLock, create_run_folder
from lit_cifar.tools.forked import start_forked


def hold(folder: Path) -> None:
    RunLock().take(folder)
    (folder / "held").touch()
    time.sleep(600)


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    holder = start_forked(hold, (tmp_path,))
    while not (tmp_path / "held").exists():
        assert holder.is_alive()
        time.sleep(0.05)
    fit = ["fit", *TINY, "--resume=auto", f"--run_dir={tmp_path}"]
    refused = run_here(*fit)
    assert refused.status == 2
    assert f"is in use by process {holder.pid} on {socket.gethostname()}, since 20" in refused.stderr
    assert len(refused.stderr.splitlines()) == 2
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, "held"}
    holder.kill()
    holder.join()
    assert run_here(*fit, "--trainer.max_steps=1").status == 0
    RunLock().take(tmp_path)  # the run that has ended holds it no longer


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="has no locks"), RunLock() as lock:
        lock.take(tmp_path)


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each has looked before the other has made its own."""

    class Clock:
        now = staticmethod(lambda: datetime(2026, 11, 24))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "datetime", Clock)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    folders = [create_run_folder(None, label="fit", lock=RunLock()) for _ in range(3)]
    assert [folder.name for folder in folders] == [f"20261124-000000-fit{number}" for number in ("", "-2", "-3")]
