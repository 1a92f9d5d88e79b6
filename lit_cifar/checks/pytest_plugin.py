"""Pytest fixtures for other projects, which judge a training in processes of its own.

>>> def test_two_processes_train_what_one_does(replayed):
...     replayed("my_package.MyModule", "--data=my_package.MyData", "--trainer.strategy=ddp", "--trainer.devices=2")
>>> def test_a_resumed_training_is_the_same(related):
...     related("train.py", "--only=resume,evaluation")
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def replayed(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs `lit_cifar verify --module` with these flags, by default on the CPU; the test fails if that does not pass.
    Returns the report, as docs/replay.md describes `replay.json`.
    """

    def judged(module: str, *flags: str) -> dict[str, Any]:
        own = ["--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}"]
        return _report(["verify", "--module", module, *own, *flags], tmp_path / "replay-result.json")

    return judged


@pytest.fixture
def related(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs `lit_cifar relations` with these words; the test fails if a relation does, or if nothing was judged.
    Returns the content of `--json`; `verdicts` has the outcome of each relation.
    """
    return lambda script, *flags: _report(["relations", script, *flags], tmp_path / "relations-result.json")


def _report(words: Sequence[str], file: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "lit_cifar", *words[:1], f"--json={file}", *words[1:]],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    if done.returncode or not file.exists():
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        pytest.fail(f"{' '.join(words[:3])}: exit status {done.returncode}\n{said}", False)
    report: dict[str, Any] = json.loads(file.read_text())
    return report
