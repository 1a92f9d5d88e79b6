"""What a run prints and records about itself."""

import json
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from tiny_task import TinyData, TinyTask, tiny_trainer

from lit_cifar.models.blocks import Partition
from lit_cifar.models.resnet import build_resnet
from lit_cifar.reporting.environment import command_line, git_state, strategy_name
from lit_cifar.reporting.run_report import RunReport, next_steps, opening_lines
from lit_cifar.task.module import LitResNet

IMAGE = (3, 32, 32)


def fit(folder: Path, **settings: Any) -> None:
    checkpoint = ModelCheckpoint(monitor="val/acc", mode="max", filename="best")
    settings = {"callbacks": [RunReport(), checkpoint], "enable_checkpointing": True} | settings
    tiny_trainer(folder, **settings).fit(TinyTask(), datamodule=TinyData())


def test_environment_says_what_ran_and_not_where(tmp_path: Path) -> None:
    fit(tmp_path)
    text = (tmp_path / "environment.json").read_text()
    trainer = tiny_trainer(tmp_path, callbacks=[RunReport()])
    trainer.test(TinyTask(), datamodule=TinyData(), verbose=False)
    assert (tmp_path / "environment.json").read_text() == text, "that of the first stage stays"
    found = json.loads(text)

    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert {"lightning", "torchvision", "torchmetrics", "lit-cifar"} <= found["versions"].keys()
    assert found["strategy"] == "single_device"
    assert found["device"] == "cpu"
    assert found["world_size"] == found["layout"]["dp_size"] == 1
    assert found["precision"] == "32-true"
    assert found["data"] == "tiny"
    assert found["started"].endswith("+00:00")
    assert found["cpu"]["model"]
    assert platform.node() not in text
    assert str(Path.home()) not in text


def test_a_failed_fit_promises_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(TinyTask):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        tiny_trainer(tmp_path, callbacks=[RunReport()]).fit(Failing(), datamodule=TinyData())
    assert "run folder" not in capsys.readouterr().out


def lines_of(*, batch_size: int, accumulation: int = 1, **strategy: Any) -> list[str]:
    """What is printed about two processes that read a part of each batch."""
    shards = {"num_replicas": 2, "rank": 0}
    facts = {"distributed_sampler_kwargs": shards, "root_device": torch.device("cpu"), "strategy_name": "made_up"}
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(**facts, **strategy),
        accumulate_grad_batches=accumulation,
        world_size=2,
        precision="bf16-mixed",
    )
    data = SimpleNamespace(batch_size=batch_size, name="CIFAR-10", sets={"train": range(50_000), "val": range(0)})
    return opening_lines(trainer, LitResNet("resnet10", stem="imagenet"), data)


def test_plan_divides_the_global_batch_and_ends_with_what_the_mode_splits() -> None:
    table = Partition.of(build_resnet("resnet10"), IMAGE, num_stages=2).table(["process 0", "process 1"])
    lines = lines_of(batch_size=128, accumulation=4, replicas_per_rank=2, split_lines=lambda: table)
    assert lines == [
        "model       resnet10, imagenet stem, 4.91 M parameters",
        "data        CIFAR-10: 50,000 images to train on",
        "batch       128 = 4 replicas x 8 x 4 accumulated images per optimizer step",
        "mode        made_up: 2 processes, cpu, bf16-mixed",
        f"split       {table[0]}",
        f"            {table[1]}",
    ]
    assert max(len(line) for line in lines) <= 120
    assert "batch       64 = 2 replicas x 4 microbatches x 8 images per optimizer step" in lines_of(
        batch_size=64, num_microbatches=4
    )


def test_folders_elsewhere_stay_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert next_steps(tmp_path / "there", "test") == [
        f"run folder  {tmp_path}/there",
        f"look at it  tensorboard --logdir {tmp_path}/there --host localhost",
        f"report      python -m lit_cifar report {tmp_path}/there",
    ]
    assert next_steps(Path(), "predict") == ["run folder  .", "predictions predictions.csv"]


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (
            ["/home/me/lit_cifar/__main__.py", "fit", "--run_dir", "my run"],
            "python -m lit_cifar fit --run_dir 'my run'",
        ),
        (["/usr/local/bin/lit-cifar", "fit"], "lit-cifar fit"),
    ],
)
def test_command_line_as_typed(argv: list[str], typed: str) -> None:
    assert command_line(argv) == typed


@pytest.mark.parametrize(("start_method", "name"), [("popen", "ddp"), ("spawn", "ddp_spawn")])
def test_strategy_has_the_name_of_its_flag(start_method: Any, name: str) -> None:
    assert strategy_name(SimpleNamespace(strategy=DDPStrategy(start_method=start_method))) == name


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
