"""Progress as text, a bar on a terminal or lines in a file; images per second by a clock that the test moves."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import TINY, callback, launch, mode_flags
from tiny_task import TinyData, TinyTask, read_events, tiny_trainer
from torch import Tensor

from lit_cifar.data.images import Batch
from lit_cifar.mode import Layout
from lit_cifar.reporting import progress
from lit_cifar.reporting.progress import METRIC, ProgressBar, Throughput

# ---------------------------------------------------------------- the bar, and lines


def fit(folder: Path, bar: ProgressBar, **settings: Any) -> None:
    settings = {"max_epochs": 2, "enable_progress_bar": True, "logger": False} | settings
    tiny_trainer(folder, callbacks=[bar, Throughput(warmup_steps=1)], **settings).fit(TinyTask(), datamodule=TinyData())


@pytest.mark.parametrize(
    ("bar", "settings", "begins"),
    [
        ({}, {}, ["epoch 1/2  done", "epoch 2/2  done"]),
        ({}, {"max_epochs": -1, "max_steps": 4}, ["epoch 1  done", "epoch 2   33%"]),
        ({"line_every_s": 0}, {"max_epochs": 1}, [f"epoch 1/1  {done}" for done in (" 33%", " 67%", "100%", "done")]),
        ({"refresh_rate": 0}, {}, []),
    ],
    ids=["epochs", "endless", "a long epoch", "none"],
)
def test_a_log_file_gets_a_line_per_epoch_and_in_long_ones(
    bar: Any, settings: Any, begins: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, ProgressBar(**bar), **settings)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))
    if begins and "done" in begins[-1]:
        assert re.search(r"done  loss [\d.]+  val [\d.]+  img/s \d+  \d+ s$", lines[-1])
    assert "\r" not in out + err


def test_no_epoch_shows_the_validation_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ProgressBar(), max_epochs=3, check_val_every_n_epoch=2)
    assert [" val " in line for line in capsys.readouterr().out.splitlines()] == [False, True, False]


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


@pytest.mark.parametrize(
    ("accumulation", "limits"), [(1, {}), (2, {}), (1, {"max_epochs": 15, "max_steps": 48}), (2, {"max_steps": 24})]
)
def test_a_log_file_gets_lines_soon_and_then_less_often_with_the_time_that_is_left(
    accumulation: int,
    limits: dict[str, int],
    tmp_path: Path,
    clock: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings: dict[str, Any] = {"enable_progress_bar": True, "logger": False, "limit_val_batches": 0}
    settings |= {"max_epochs": 2, "accumulate_grad_batches": accumulation, **limits}
    trainer = tiny_trainer(tmp_path, callbacks=[ProgressBar()], **settings)
    trainer.fit(TimedTask(clock, first_s=2.0, step_s=2.0), datamodule=TinyData(num_images=8 * 24))
    lines = [re.sub(r"  loss .*?  (\d+ s)", r"  \1", line) for line in capsys.readouterr().out.splitlines()]
    of = settings["max_epochs"]
    assert lines == [
        f"epoch 1/{of}   12%  6 s, 0:01:30 left",
        f"epoch 1/{of}   25%  12 s, 0:01:24 left",
        f"epoch 1/{of}   50%  24 s, 0:01:12 left",
        f"epoch 1/{of}  100%  48 s, 0:00:48 left",
        f"epoch 1/{of}  done  48 s, 0:00:48 left",
        f"epoch 2/{of}  100%  48 s",
        f"epoch 2/{of}  done  48 s",
    ]


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_gets_a_bar_with_short_names_and_a_whole_line_per_epoch(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (columns, 24))
    fit(tmp_path, ProgressBar(refresh_rate=1))
    shown = capsys.readouterr().out
    parts = shown.replace("\n", "\r").split("\r")
    assert any("3/3" in part and (columns == 40 or "loss=" in part) for part in parts)
    for epoch in ("1/2", "2/2"):
        line = rf"epoch {epoch}  done  loss [\d.]+  val [\d.]+  img/s \d+  \d+ s(, 0:00:\d\d left)?$"
        assert any(re.match(line, part) for part in parts)
    assert "train/" not in shown


@pytest.mark.parametrize("asked", ["TQDMProgressBar", "recorder.AskAlone"])
def test_rank_0_may_ask_for_the_means_of_an_epoch_alone(asked: str, tmp_path: Path) -> None:
    """It would wait for the others, which go on to what comes next."""
    shown = [flag for flag in TINY if "progress_bar" not in flag]
    launch("fit", *shown, *callback(asked), *mode_flags("ddp"), f"--run_dir={tmp_path / 'run'}", timeout_s=60)


# ---------------------------------------------------------------- images per second


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
