"""Progress as text, a bar on a terminal or lines in a file; images per second by a clock that the test moves."""

import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import TINY, callback, launch, logged, mode_flags
from lightning.pytorch import Callback
from tiny_task import TinyData, TinyTask, read_events, tiny_trainer
from torch import Tensor

from lit_cifar.cli.main import main
from lit_cifar.data.images import Batch
from lit_cifar.mode import Layout
from lit_cifar.reporting import progress
from lit_cifar.reporting.progress import METRIC, EpochLines, Throughput


def fit(folder: Path, *bars: Callback, **settings: Any) -> None:
    settings = {"max_epochs": 2, "enable_progress_bar": bool(bars), "logger": False} | settings
    callbacks = [EpochLines(), *bars, Throughput(warmup_steps=1)]
    tiny_trainer(folder, callbacks=callbacks, **settings).fit(TinyTask(), datamodule=TinyData())


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({}, ["epoch 1/2  done", "epoch 2/2  done"]),
        ({"max_epochs": -1, "max_steps": 4}, ["epoch 1  done", "epoch 2   33%"]),
    ],
    ids=["epochs", "endless"],
)
def test_a_log_file_gets_a_line_per_epoch(
    settings: Any, begins: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, **settings)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))
    if "done" in begins[-1]:
        assert re.search(r"done  loss [\d.]+  val [\d.]+  img/s \d+  \d+ s$", lines[-1])
    assert "\r" not in out + err


@pytest.mark.parametrize("every", [{}, {"check_val_every_n_epoch": None, "val_check_interval": 5}])
def test_no_epoch_shows_the_validation_of_another(
    every: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, **{"max_epochs": 3, "check_val_every_n_epoch": 2} | every)
    assert [" val " in line for line in capsys.readouterr().out.splitlines()] == [False, True, False]


def test_each_step_has_its_own_loss_once_a_training_should_stop(tmp_path: Path) -> None:
    flags = [*TINY, *callback("EarlyStopping", monitor="val/acc", mode="max", stopping_threshold=-1.0)]
    flags += ["--trainer.min_epochs=2", "--trainer.max_epochs=2", "--trainer.log_every_n_steps=4"]
    main(["fit", *flags, f"--run_dir={tmp_path / 'run'}"])
    found = [row["train/loss_step"] for row in logged(tmp_path / "run") if row.get("train/loss_step")]
    assert len({*found}) == len(found) > 5


@pytest.mark.parametrize(
    ("flags", "has_bar", "is_ours"),
    [
        ([], True, True),
        (["--trainer.callbacks=TQDMProgressBar"], True, False),
        (["--trainer.enable_progress_bar=false"], False, False),
    ],
)
def test_a_terminal_gets_our_bar_or_the_users(flags: list[str], has_bar: bool, is_ours: bool, tmp_path: Path) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    shown = [flag for flag in TINY if "progress_bar" not in flag]
    with contextlib.redirect_stdout(terminal):
        main(["fit", *shown, *flags, f"--run_dir={tmp_path / 'run'}"])
    parts = terminal.getvalue().replace("\r", "\n").split("\n")
    assert any(part.startswith("Epoch 0: 100%") for part in parts) == has_bar
    assert any("loss_step=" in part for part in parts) == is_ours
    line = r"epoch 1/1  done  loss [\d.]+  acc [\d.]+  val [\d.]+  img/s \d+  \d+ s"
    assert sum(bool(re.fullmatch(line, part.strip())) for part in parts) == is_ours


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "perf_counter", lambda: clock.now)
    return clock


class TimedTask(TinyTask):
    """Its training steps take so many seconds of `clock`, the very first another number; a validation step 1000."""

    def __init__(self, clock: SimpleNamespace, *, first_s: float, step_s: float) -> None:
        super().__init__()
        self.clock, self.next_s, self.step_s = clock, first_s, step_s

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.clock.now += self.next_s
        self.next_s = self.step_s
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.clock.now += 1000.0
        return super().validation_step(batch, batch_idx)


def test_a_log_has_a_line_a_minute(tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tiny_trainer(tmp_path, callbacks=[EpochLines()], max_epochs=1, limit_val_batches=0)
    trainer.fit(TimedTask(clock, first_s=50.0, step_s=25.0), datamodule=TinyData(num_images=48))
    lines = [re.sub("  loss.*  ", "  ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["epoch 1/1   33%  75 s", "epoch 1/1   83%  150 s", "epoch 1/1  done  175 s"]


@pytest.mark.parametrize("asked", ["TQDMProgressBar", "recorder.AskAlone"])
def test_rank_0_may_ask_for_the_means_of_an_epoch_alone(asked: str, tmp_path: Path) -> None:
    """It would wait for the others, which go on to what comes next."""
    shown = [flag for flag in TINY if "progress_bar" not in flag]
    flags = [*shown, *callback(asked), *mode_flags("ddp"), f"--run_dir={tmp_path / 'run'}"]
    launch("fit", *flags, timeout_s=60, ranks=2)


def measured(folder: Path, clock: SimpleNamespace, **settings: Any) -> list[tuple[int, float]]:
    """Four batches of 8 images an epoch, three epochs; the logged (step, images per second)."""
    trainer = tiny_trainer(folder, callbacks=[Throughput(warmup_steps=1)], max_epochs=3, **settings)
    trainer.fit(TimedTask(clock, first_s=100.0, step_s=0.5), datamodule=TinyData(num_images=32))
    return [(event.step, event.value) for event in read_events(folder).Scalars(METRIC)]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"log_every_n_steps": 2}, [1, 3, 5, 7, 9, 11]),
        ({"log_every_n_steps": 3}, [2, 5, 8, 11]),  # windows run on through epochs
        ({"log_every_n_steps": 3, "val_check_interval": 0.5}, [2, 5, 8, 11]),
        ({"log_every_n_steps": 1, "accumulate_grad_batches": 2}, [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_only_steps_are_timed(settings: Any, steps: list[int], tmp_path: Path, clock: SimpleNamespace) -> None:
    # Lightning numbers steps from 0. Every window measures 16 images/s.
    assert measured(tmp_path, clock, **settings) == [(step, 16.0) for step in steps]


def test_images_of_all_ranks_count(tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    four = SimpleNamespace(layout=Layout(data_parallel_size=4))
    monkeypatch.setattr(progress, "mode_of", lambda strategy: four)
    assert measured(tmp_path, clock, log_every_n_steps=4) == [(3, 64.0), (7, 64.0), (11, 64.0)]


def test_where_the_host_waits(tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(progress, "_finish_queued_work", lambda module: waits.append(module.global_step))
    measured(tmp_path, clock, log_every_n_steps=3)
    # After the warm-up (1), at the log points (3, 6, 9, 12), and where validation begins (4, 8, 12).
    assert waits == [1, 3, 4, 6, 8, 9, 12, 12]
