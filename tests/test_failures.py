"""What fails or is killed leaves nothing behind: no process (see `conftest.py`), no open port, no temporary file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import TINY, launch


def listening() -> set[int]:
    """Ports on which this user's processes listen."""
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_failing_stage_ends_the_whole_pipeline(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    before = listening()
    failing = ["--trainer.callbacks+=recorder.FailOn", f"--trainer.callbacks.rank={rank}"]
    pipeline = ["--trainer.strategy=pp", "--trainer.devices=2", f"--run_dir={tmp_path / 'run'}"]
    result = launch("fit", *TINY, *pipeline, *failing, check=False)
    assert result.status == 1
    assert f"rank {rank} fails at step 1" in result.stderr
    assert not list((tmp_path / "tmp").iterdir())
    assert listening() <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_verification_that_is_stopped_takes_its_runs_with_it(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lit_cifar", "verify", "--modes", "ddp", "--model.arch=resnet10"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    verify = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not list(tmp_path.glob("lit_cifar-verify-*/reference-*")):  # the settings are read, the first run begins
            assert verify.poll() is None
            time.sleep(0.1)
        runs = descendants(verify)
        verify.send_signal(number)
        assert verify.wait(30) == 128 + number
    finally:
        verify.kill()
        verify.wait()
    assert not list(tmp_path.iterdir())
    assert not psutil.wait_procs(runs, timeout=10)[1]
