"""Images per second by a clock that the test itself moves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_task import TinyData, TinyTask, read_events, tiny_trainer
from torch import Tensor

from lit_cifar.batch_split import BatchSplit
from lit_cifar.data.images import Batch
from lit_cifar.reporting import throughput
from lit_cifar.reporting.throughput import METRIC, Throughput


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTask(TinyTask):
    """A training step takes 0.5 s, the very first 100 s; a validation step 1000 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.warm = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.clock.now += 0.5 if self.warm else 100.0
        self.warm = True
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.clock.now += 1000.0
        return super().validation_step(batch, batch_idx)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "perf_counter", clock)
    return clock


def fit(folder: Path, clock: Clock, **settings: Any) -> list[tuple[int, float]]:
    """Four batches of 8 images an epoch, three epochs; the logged (step, images per second)."""
    trainer = tiny_trainer(folder, callbacks=[Throughput(warmup_steps=1)], max_epochs=3, **settings)
    trainer.fit(TimedTask(clock), datamodule=TinyData(num_images=32))
    return [(event.step, event.value) for event in read_events(folder).Scalars(METRIC)]


def test_rate_leaves_out_warm_up_and_validation(tmp_path: Path, clock: Clock) -> None:
    # Lightning numbers steps from 0. The windows end after steps 2, 4, ..., and every one of them measures 16 images/s.
    assert fit(tmp_path, clock, log_every_n_steps=2) == [(step, 16.0) for step in (1, 3, 5, 7, 9, 11)]


def test_windows_run_on_through_epochs(tmp_path: Path, clock: Clock) -> None:
    assert fit(tmp_path, clock, log_every_n_steps=3) == [(2, 16.0), (5, 16.0), (8, 16.0), (11, 16.0)]


def test_validation_in_the_middle_of_an_epoch(tmp_path: Path, clock: Clock) -> None:
    rates = fit(tmp_path, clock, log_every_n_steps=3, val_check_interval=0.5)
    assert rates == [(step, 16.0) for step in (2, 5, 8, 11)]


def test_accumulated_batches_all_count(tmp_path: Path, clock: Clock) -> None:
    rates = fit(tmp_path, clock, log_every_n_steps=1, accumulate_grad_batches=2)
    assert [rate for _, rate in rates] == [16.0] * len(rates)
    assert len(rates) == 6


def test_images_of_all_ranks_count(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "BatchSplit", SimpleNamespace(of=lambda strategy: BatchSplit(dp_size=4)))
    assert fit(tmp_path, clock, log_every_n_steps=4) == [(3, 64.0), (7, 64.0), (11, 64.0)]


def test_device_is_waited_for_only_where_the_clock_is_read(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    monkeypatch.setattr(throughput, "_finish_queued_work", lambda module: waits.append(module.global_step))
    fit(tmp_path, clock, log_every_n_steps=3)
    # After the warm-up (1), at the log points (3, 6, 9, 12), and where validation begins (4, 8, 12).
    assert waits == [1, 3, 4, 6, 8, 9, 12, 12]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rate_on_a_gpu_counts_finished_work(tmp_path: Path) -> None:
    class BusyTask(TinyTask):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            torch.cuda._sleep(50_000_000)  # queued on the device; the host goes on at once
            return super().training_step(batch, batch_idx)

    settings: dict[str, Any] = {"accelerator": "gpu", "log_every_n_steps": 4, "limit_val_batches": 0}
    trainer = tiny_trainer(tmp_path, callbacks=[Throughput(warmup_steps=1)], max_epochs=3, **settings)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    fastest = 8 / (start.elapsed_time(end) / 1000)
    trainer.fit(BusyTask(), datamodule=TinyData(num_images=32))
    assert all(event.value < 1.1 * fastest for event in read_events(tmp_path).Scalars(METRIC))
