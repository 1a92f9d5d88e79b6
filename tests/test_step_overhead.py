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
from lit_cifar.data.synthetic import Synthetic
from lit_cifar.task.metrics import MeanLoss


class StopAfter(Callback):
    """Stops the run after `stop_after` steps."""

    def __init__(self, stop_after: int) -> None:
        self.stop_after = stop_after

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.stop_after


def test_logs_are_the_same_at_fewer_log_points(tmp_path: Path) -> None:
    """Also in the step after which a callback stops the run: Lightning logs it out of turn."""
    stop = [f"--trainer.callbacks+={__name__}.StopAfter", "--trainer.callbacks.stop_after=3"]
    epochs, steps = [], []
    for every in (1, 2):
        run = tmp_path / str(every)
        assert run_here("fit", *TINY, *stop, f"--trainer.log_every_n_steps={every}", f"--run_dir={run}").status == 0
        with (run / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        steps.append({int(row["step"]): row["train/loss_step"] for row in rows if row["train/loss_step"]})
        epochs.append(rows[-1]["train/loss"])
    assert [*steps[0]] == [0, 1, 2]
    assert steps[1] == {step: steps[0][step] for step in (1, 2)}
    assert epochs[0] == epochs[1] != ""


@short
def test_lightning_logs_no_step_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    log = LightningModule.log
    noting = lambda module, name, *args, **kwargs: names.append(name) or log(module, name, *args, **kwargs)  # noqa: E731
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
