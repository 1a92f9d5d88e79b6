"""`mp`: what a Trainer does with the layers over one process's devices, and what is refused."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from commands import TINY, run_here
from comparing import assert_same_checkpoint
from torch import nn

from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.errors import ConfigError
from lit_cifar.launch.signals import EXIT_STOPPED
from lit_cifar.strategies import LayerParallelStrategy
from lit_cifar.task.module import LitResNet

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
CLASS = "--trainer.strategy=LayerParallelStrategy"


def trainer_of(*, devices: int = 2, sync_batchnorm: bool = False, **sizes: Any) -> L.Trainer:
    strategy = LayerParallelStrategy(**sizes)
    return L.Trainer(strategy=strategy, devices=devices, accelerator="cpu", sync_batchnorm=sync_batchnorm, **QUIET)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("devices", "num_stages", "places"),
    [(2, None, [0, 1]), (2, 4, [0, 0, 1, 1]), (1, 3, [0, 0, 0]), (3, None, [0, 1, 2]), (1, None, [0])],
)
def test_stages_over_devices(devices: int, num_stages: int | None, places: list[int]) -> None:
    trainer = trainer_of(devices=devices, num_stages=num_stages)
    trainer.strategy.connect(LitResNet("resnet10", stem="imagenet"))
    lines = trainer.strategy.split_lines()
    assert len(trainer.strategy.stage_devices) == len(lines) == len(places)
    assert [line.split("  ")[1].strip() for line in lines] == [f"cpu {place}" for place in places]


def test_cuts_can_be_named() -> None:
    trainer = trainer_of(cuts=["layer4.0"])
    trainer.strategy.connect(LitResNet("resnet10", stem="imagenet"))
    assert [stage.span for stage in trainer.strategy.partition.stages] == ["stem to layer3.0", "layer4.0 to head"]


def test_batch_split_is_known_before_fit() -> None:
    assert BatchSplit.of(trainer_of(num_microbatches=4).strategy) == BatchSplit(num_microbatches=4)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        ({"devices": 2, "num_stages": 3}, "num_stages=3 do not divide", "num_stages=4 or --trainer.devices=3"),
        ({"devices": 4, "num_stages": 2}, "num_stages=2 do not divide", "num_stages=4 or --trainer.devices=2"),
        ({"num_stages": 0}, "num_stages=0 is less than one", "num_stages=1"),
        ({"num_microbatches": 0}, "num_microbatches=0 is less than one", "num_microbatches=1"),
        (
            {"sync_batchnorm": True, "num_microbatches": 2},
            "sync_batchnorm=true with 2",
            "Drop --trainer.sync_batchnorm",
        ),
    ],
)
def test_refused_while_the_trainer_is_made(arguments: dict[str, Any], problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_of(**arguments)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    assert len(str(caught.value).splitlines()) <= 5


def test_one_microbatch_leaves_synchronised_batchnorm_nothing_to_do() -> None:
    assert trainer_of(sync_batchnorm=True).world_size == 1


def test_another_network_is_refused() -> None:
    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Linear(1, 1)

        def use_runner(self, runner: Any) -> None: ...

    with pytest.raises(ConfigError, match="Linear does not say which"):
        trainer_of().strategy.connect(Lit())


# ---------------------------------------------------------------- whole runs


def fit(folder: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    shared = ["--trainer.precision=64-true", "--model.optimizer.lr=0.02", "--trainer.limit_val_batches=0"]
    result = run_here("fit", *TINY, *shared, *flags, f"--run_dir={folder}")
    assert result.status == status, result.stderr
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")


def test_one_device_and_mp_resume_each_other(tmp_path: Path) -> None:
    """Two epochs in one go, and both in part by two modes, optimizer and schedule included, are the same bits.

    In float32: Lightning loads a float64 checkpoint into a float32 network, and converts that.
    """
    mp, alone = ["--trainer.strategy=mp", "--trainer.devices=2"], ["--trainer.devices=1"]
    two_epochs = ["--trainer.precision=32-true", "--trainer.max_epochs=2"]
    stops = [
        "--last_checkpoint.every_n_steps=1",
        "--trainer.callbacks+=stopping.SignalAfter",
        "--trainer.callbacks.step=7",
    ]
    whole = fit(tmp_path / "whole", *alone, *two_epochs)
    for first, second in ((mp, alone), (alone, mp)):
        begun, ended = (tmp_path / f"{first[0]}-{part}" for part in ("begun", "ended"))
        fit(begun, *first, *two_epochs, *stops, status=EXIT_STOPPED)
        last = begun / "checkpoints" / "last.ckpt"
        assert_same_checkpoint(fit(ended, *second, *two_epochs, f"--ckpt_path={last}"), whole, tolerance=0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_reduced_precision_trains(precision: str, tmp_path: Path) -> None:
    flags = [CLASS, "--trainer.strategy.num_microbatches=2", "--trainer.devices=2", f"--trainer.precision={precision}"]
    result = run_here("fit", *TINY, *flags, "--data.num_train=48", f"--run_dir={tmp_path / 'run'}")
    assert result.status == 0, result.stderr
