"""The sweep of `examples/`, as a person starts it: trials on two processes each, pruned, killed and resumed."""

import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, callback, mode_flags
from documents import ROOT
from processes import marked

FLAGS = [
    *TINY,
    *mode_flags("ddp"),
    *["--data.num_train=512", "--data.val_size=256", "--data.batch_size=32", "--trainer.max_epochs=3"],
    *callback("stopping.SlowSteps", seconds=0.3),  # time to kill it in the middle of an epoch
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("sweeps"),
    pytest.mark.skipif(find_spec("optuna") is None, reason="optuna is not installed: pip install 'lit-cifar[sweeps]'"),
]


class Sweep:
    """The example with trials of `FLAGS`, of which the first is never pruned."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sweep, self.log = folder, folder / "sweep", folder / "log"

    def start(self) -> subprocess.Popen[bytes]:
        own = ["--unpruned=1", f"--folder={self.sweep}", "--trials=3"]
        words = [sys.executable, "examples/sweep_optuna.py", *own, *FLAGS]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        with self.log.open("ab") as log:
            return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def finish(self) -> None:
        assert self.start().wait(800) == 0, self.log.read_text()

    def kill(self) -> None:
        """Kill it, but not its trial, in the second epoch of the first; return when the trial has ended too."""
        process, metrics, deadline = self.start(), self.sweep / "trial-0" / "metrics.csv", time.monotonic() + 400
        while not (metrics.exists() and "\n1," in metrics.read_text()):
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        process.kill()
        process.wait()
        while marked(self.folder):
            assert time.monotonic() < deadline, "the trial goes on without the sweep"
            time.sleep(0.2)

    def trials(self) -> list[Any]:
        import optuna

        return optuna.load_study(study_name="sweep", storage=f"sqlite:///{self.sweep}/study.db").trials


def test_a_killed_sweep_goes_on_in_the_middle_of_its_trial_and_ends_bad_ones_early(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    sweep.kill()
    assert [trial.state.name for trial in sweep.trials()] == ["RUNNING"]
    sweep.finish()
    assert {"resuming", "stopped by SIGTERM"} <= {*re.findall("resuming|stopped by SIGTERM", sweep.log.read_text())}
    first, *others = (trial for trial in sweep.trials() if trial.state.name != "FAIL")  # which another one took over
    assert first.state.name == "COMPLETE"
    assert "PRUNED" in {trial.state.name for trial in others}
    assert len({json.dumps(trial.params) for trial in (first, *others)}) == 3
