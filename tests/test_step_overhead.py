"""What is left out of a step because nobody uses it, and that nothing else is."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, run_here
from lightning.pytorch import Callback, LightningModule, Trainer
from short_fits import fit, short
from torchmetrics import MeanMetric

from lit_cifar import CIFAR10DataModule, LitResNet
from lit_cifar.callbacks import NoProfiler, prune_hooks
from lit_cifar.data.synthetic import Synthetic
from lit_cifar.task.metrics import MeanLoss

seen: dict[str, Any] = {}


class Notes(Callback):
    """Notes which of its hooks are called, and stops the run after `stop_after` steps."""

    def __init__(self, stop_after: int = -1) -> None:
        self.stop_after = stop_after
        seen.clear()

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        seen["backward"] = seen.get("backward", 0) + 1
        seen["profiler"] = type(trainer.profiler).__name__

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.stop_after


NOTES = f"--trainer.callbacks+={__name__}.Notes"


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def step_losses(run: Path) -> dict[int, str]:
    """What was logged of single steps, by step, counted from 0."""
    return {int(row["step"]): row["train/loss_step"] for row in rows(run) if row["train/loss_step"]}


def test_only_empty_hooks_are_left_out() -> None:
    empty, own, patched, module = Callback(), Notes(), Callback(), LitResNet("tiny")
    patched.on_train_batch_start = print
    prune_hooks([empty, own, patched], module)
    assert empty.on_train_batch_end is None
    assert own.on_train_batch_start is None
    assert callable(own.on_train_batch_end)
    assert callable(own.on_before_backward)
    assert patched.on_train_batch_start is print
    assert module.on_before_zero_grad is None
    assert callable(module.on_train_batch_end)
    assert callable(module.on_validation_batch_start)  # whose signature Lightning reads


@pytest.mark.parametrize(
    ("flags", "profiler"), [([], NoProfiler.__name__), (["--trainer.profiler=simple"], "SimpleProfiler")]
)
def test_a_run_calls_the_hooks_that_a_callback_has(flags: list[str], profiler: str, tmp_path: Path) -> None:
    """With the profiler that is asked for; and no validation comes before the first step."""
    assert run_here("fit", *TINY, NOTES, *flags, f"--run_dir={tmp_path}").status == 0
    assert seen == {"backward": 5, "profiler": profiler}
    assert "num_sanity_val_steps: 0" in (tmp_path / "config.yaml").read_text()


def test_logs_are_the_same_at_fewer_log_points(tmp_path: Path) -> None:
    """Also in the step after which a callback stops the run: Lightning logs it out of turn."""
    for name, every in {"all": 1, "some": 2}.items():
        flags = [NOTES, "--trainer.callbacks.stop_after=3", f"--trainer.log_every_n_steps={every}"]
        assert run_here("fit", *TINY, *flags, f"--run_dir={tmp_path / name}").status == 0
    of_all, of_some = step_losses(tmp_path / "all"), step_losses(tmp_path / "some")
    assert [*of_all] == [0, 1, 2]
    assert of_some == {step: of_all[step] for step in (1, 2)}
    assert rows(tmp_path / "all")[-1]["train/loss"] == rows(tmp_path / "some")[-1]["train/loss"] != ""


@short
def test_lightning_logs_no_step_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    log = LightningModule.log

    def noting(module: LightningModule, name: str, *args: Any, **kwargs: Any) -> None:
        names.append(name)
        log(module, name, *args, **kwargs)

    monkeypatch.setattr(LightningModule, "log", noting)
    module = LitResNet("tiny", stem="imagenet")
    assert module.step_metrics() == {}
    fit(module, tmp_path, log_every_n_steps=2)
    assert [name for name in names if name.endswith("_step")] == ["train/loss_step", "train/acc_step"]
    assert [name for name in names if name in ("train/loss", "train/acc")] == ["train/loss", "train/acc"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mean_loss_is_torchmetrics_mean(dtype: torch.dtype) -> None:
    ours, theirs = MeanLoss(), MeanMetric(nan_strategy="disable")
    for size in (16, 16, 5, 0):
        losses = torch.rand(size).to(dtype)
        ours.update(losses)
        theirs.update(losses)
    torch.testing.assert_close(ours.compute(), theirs.compute())


def test_data_are_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line does so before processes start; Lightning then asks again."""
    times: list[bool] = []
    monkeypatch.setattr(Synthetic, "prepare", lambda *_, download: times.append(download))
    data = CIFAR10DataModule(dataset="synthetic")
    data.prepare_data()
    data.prepare_data()
    assert times == [True]
