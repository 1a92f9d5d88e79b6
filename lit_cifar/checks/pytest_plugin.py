"""A pytest fixture for other projects, `replayed`: judges a training in processes of its own.

>>> def test_two_processes_train_what_one_does(replayed):
...     replayed("my_package.MyModule", "--data=my_package.MyData", "--trainer.strategy=ddp", "--trainer.devices=2")
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def replayed(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs `lit_cifar verify --module` with these flags, by default on the CPU; the test fails if that does not pass.
    Returns the report, as docs/replay.md describes `replay.json`.
    """

    def judged(module: str, *flags: str) -> dict[str, Any]:
        file = tmp_path / "replay-result.json"
        own = ["--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}", f"--json={file}"]
        done = subprocess.run(
            [sys.executable, "-m", "lit_cifar", "verify", "--module", module, *own, *flags],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )
        if done.returncode or not file.exists():
            pytest.fail(f"{module}: exit status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}", False)
        report: dict[str, Any] = json.loads(file.read_text())
        return report

    return judged
