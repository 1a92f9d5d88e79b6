"""The sections `overhead` and `recovery` of `bench`: what their runs write down, and the rows made of it."""

import json
from pathlib import Path

import pytest
import torch
from commands import TINY, run_here
from short_fits import data, fit, short
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from lit_cifar import LitResNet
from lit_cifar.bench import overhead, recovery
from lit_cifar.bench.plain_loop import PlainLoop, Small
from lit_cifar.bench.random_cifar10 import write_random_cifar10
from lit_cifar.bench.recovery import Recovery
from lit_cifar.bench.settings import Settings
from lit_cifar.data import CIFAR10DataModule


def settings(folder: Path) -> Settings:
    return Settings(device=torch.device("cpu"), folder=folder, rounds=2, small=True)


@short
def test_the_plain_loop_computes_what_fit_computes(tmp_path: Path) -> None:
    """Else it would be no measure: the same weights, bit for bit, and the same mean loss."""
    network, twin = Small(), Small()
    twin.load_state_dict(network.state_dict())
    module = LitResNet(
        network=network,
        optimizer=lambda params: SGD(params, lr=0.1),
        lr_scheduler=lambda optimizer: StepLR(optimizer, 1000),
    )
    images = data()
    images.setup("fit")
    loop = PlainLoop(twin, module, images, log_every_n_steps=2)
    loop.run(2)
    trainer = fit(module, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), twin.parameters(), strict=True))
    ((loss, accuracy),) = loop.logged
    assert loss == pytest.approx(float(trainer.callback_metrics["train/loss"]))
    assert accuracy == pytest.approx(float(trainer.callback_metrics["train/acc"]))


def test_turns_of_a_fit_and_of_a_plain_loop(tmp_path: Path) -> None:
    flags = ["--model.network=lit_cifar.bench.plain_loop.Small", "--data.dataset=synthetic", "--data.num_train=96"]
    flags += ["--data.val_size=0", "--data.batch_size=8", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    flags += [
        "--trainer.callbacks+=lit_cifar.bench.plain_loop.InTurn",
        f"--trainer.callbacks.file={tmp_path / 'turns'}",
    ]
    flags += ["--trainer.callbacks.steps=3", f"--run_dir={tmp_path / 'run'}"]
    assert run_here("fit", *flags).status == 0
    turns = json.loads((tmp_path / "turns").read_text())
    assert len(turns) == 12 / 3 - 2
    assert all(0 < seconds < 1 for turn in turns for clock in turn for seconds in clock)


def test_times_between_epochs(tmp_path: Path) -> None:
    flags = ["--trainer.callbacks+=lit_cifar.bench.epochs.EpochTimes", f"--trainer.callbacks.file={tmp_path / 'times'}"]
    assert run_here("fit", *TINY, *flags, "--trainer.max_epochs=4", f"--run_dir={tmp_path / 'run'}").status == 0
    times = json.loads((tmp_path / "times").read_text())
    assert len(times["outside_s"]) == 2  # of three changes the first is left out
    assert all(0 < seconds < 10 for seconds in [*times["outside_s"], times["step_s"]])


def test_the_noise_is_read_as_cifar10(tmp_path: Path) -> None:
    write_random_cifar10(tmp_path)
    images = CIFAR10DataModule(tmp_path)
    images.prepare_data()
    images.setup("fit")
    assert len(images.sets["train"]) == 45_000


def test_the_time_of_a_recovery_is_divided_without_rest() -> None:
    found = Recovery(killed=1.0, ended=1.5, started=2.25, imported=5.0, stepped=7.0, ours_cpu_s=1.0)
    assert (found.total_s, found.ours_s, found.torchrun_s, found.imports_s) == (6.0, 2.5, 0.75, 2.75)


@pytest.mark.slow
def test_rows_of_overhead(tmp_path: Path) -> None:
    rows = overhead.measure(settings(tmp_path), lambda line: None)
    assert [row.unit for row in rows] == ["us", "us", "x", "%", "s"]
    assert 0.5 < rows[2].found.median < 20


@pytest.mark.slow
def test_rows_of_recovery(tmp_path: Path) -> None:
    rows = recovery.measure(settings(tmp_path), lambda line: None)
    total, ours, ending, _, torchrun, imports = (row.found.values for row in rows)
    assert len(total) == 2
    assert all(0 < part < whole for part, whole in zip(ending, ours, strict=True))
    assert [sum(parts) for parts in zip(ours, torchrun, imports, strict=True)] == pytest.approx(total)
