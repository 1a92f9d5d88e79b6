"""What a run prints and records about itself, and a folder of its own, one run at a time."""

import errno
import fcntl
import json
import os
import platform
import socket
import subprocess
import time
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import TINY, refused, run_here
from lightning.pytorch import Trainer
from tiny_task import TinyData, TinyTask, tiny_trainer
from torch.optim import SGD

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.errors import ConfigError
from lit_cifar.launch.forked import start_forked
from lit_cifar.mode import mode_of
from lit_cifar.reporting import run_folder
from lit_cifar.reporting.environment import git_state
from lit_cifar.reporting.run_folder import LOCK, RunLock, create_run_folder
from lit_cifar.reporting.run_report import RunReport, opening_lines
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.modes import SILENT


def test_environment_says_what_ran_and_not_where(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("{}")  # of the run that is resumed
    trainer = tiny_trainer(tmp_path, callbacks=[RunReport()])
    trainer.fit(TinyTask(), datamodule=TinyData())
    text = (tmp_path / "environment.json").read_text()
    trainer.test(TinyTask(), datamodule=TinyData(), verbose=False)
    assert (tmp_path / "environment.json").read_text() == text, "that of the first stage stays"
    found = json.loads(text)

    said = {"strategy": "single_device", "device": "cpu", "world_size": 1, "precision": "32-true", "data": "tiny"}
    assert found.items() >= said.items()
    assert found["versions"].items() >= {"torch": torch.__version__, "python": platform.python_version()}.items()
    assert {"lightning", "torchvision", "torchmetrics", "lit-cifar"} <= found["versions"].keys()
    assert found["layout"]["data_parallel_size"] == 1
    assert found["started"].endswith("+00:00")
    assert found["cpu"]["model"]
    assert platform.node() not in text
    assert str(Path.home()) not in text


@pytest.mark.parametrize(
    ("strategy", "accumulated", "lines"),
    [
        ("dp", 4, ["128 = 2 replicas x 16 x 4 accumulated images per optimizer step", "dp: 1 process, cpu, 64-true"]),
        ("pp", 1, ["128 = 1 replica x 4 microbatches x 32 images per optimizer step", "pp: 2 processes, cpu, 64-true"]),
    ],
)
def test_the_beginning_divides_the_global_batch_and_says_what_the_mode_splits(
    strategy: str, accumulated: int, lines: list[str]
) -> None:
    settings = {"accelerator": "cpu", "devices": 2, "max_epochs": 15, "accumulate_grad_batches": accumulated}
    trainer = Trainer(strategy=strategy, precision="64-true", **settings, **SILENT)
    data = CIFAR10DataModule(dataset="synthetic", num_train=50, val_size=0, batch_size=128, seed=3)
    data.setup("fit")
    module = LitResNet("resnet10", stem="imagenet", optimizer=partial(SGD, lr=0.3))
    trainer.strategy.connect(module)
    split = mode_of(trainer.strategy).split_lines()
    assert len(split) == (2 if strategy == "pp" else 0)
    labels = ["model", "data", "batch", "mode", *["split", ""][: len(split)], "length", "optimizer"]
    said = ["resnet10, imagenet stem, 4.91 M parameters", "synthetic: 50 images to train on", *lines, *split]
    expected = zip(labels, [*said, "15 epochs, data seed 3", "SGD, learning rate 0.3"], strict=True)
    found = opening_lines(trainer, module, data)
    assert found == [f"{label:<12}{words}" for label, words in expected]
    assert max(len(line) for line in found) <= 120


def test_git_state_is_that_of_the_package_s_own_repository(tmp_path: Path) -> None:
    package, installed = tmp_path / "lit_cifar", tmp_path / "venv" / "lit_cifar"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "code.py").touch()
    assert git_state(package) is None

    def git(*args: str) -> str:
        who = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *who, *args], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    git("add", "lit_cifar")
    git("commit", "--quiet", "--no-verify", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert git_state(package) == {"commit": commit, "modified": False}
    assert git_state(installed) is None
    (package / "code.py").write_text("x = 1\n")
    assert git_state(package) == {"commit": commit, "modified": True}


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
    said = refused(*fit)
    assert f"is in use by process {holder.pid} on {socket.gethostname()}, since 20" in said
    assert len(said.splitlines()) == 2
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, "held"}
    holder.kill()
    holder.join()
    run_here(*fit, "--trainer.max_steps=1")
    RunLock().take(tmp_path)  # the run that has ended holds it no longer


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="has no locks"):
        RunLock().take(tmp_path)


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = staticmethod(lambda: datetime(2026, 11, 24))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "datetime", Clock)
    folders = [create_run_folder(None, label="fit", lock=RunLock()) for _ in range(3)]
    assert [folder.name for folder in folders] == [f"20261124-000000-fit{number}" for number in ("", "-2", "-3")]
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as if each had looked before the other has made its own
    with pytest.raises(ConfigError, match="File exists"):
        create_run_folder(None, label="fit", lock=RunLock())
