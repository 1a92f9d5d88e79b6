"""Speed and progress of a training: images per second, a bar in a terminal, and a line about each epoch."""

import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from lit_cifar.data.images import Batch
from lit_cifar.mode import mode_of

METRIC = "train/images_per_s"
_SHOWN = {"train/loss": "loss {:.3f}", "train/acc": "acc {:.3f}", "val/acc": "val {:.3f}", METRIC: "img/s {:.0f}"}
_LINE_EVERY_S = 60.0


class Throughput(Callback):
    """Logs `train/images_per_s`: training images over all replicas per second of wall time.

    A window lasts from one log point (`trainer.log_every_n_steps`) to the next and is averaged as a whole. Its time
    includes what an image costs to be trained on: fetching and augmenting batches, transfer, forward, backward,
    optimizer step, and waiting for slower processes. It leaves out validation and figures between epochs, `best.ckpt`,
    and the first `warmup_steps` of the fit, in which memory is allocated and kernels are chosen. The host waits for a
    GPU only at log points and when the clock stops, so that the time covers finished work.
    """

    def __init__(self, *, warmup_steps: int = 2) -> None:
        self.warmup_steps = self._warmup_left = warmup_steps
        self._started_at: float | None = None  # None while the clock stands still

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._warmup_left, self._logged_step = self.warmup_steps, trainer.global_step
        self._num_ranks = mode_of(trainer.strategy).layout.data_parallel_size
        self._num_images, self._elapsed_s, self._started_at = 0, 0.0, None

    def _start(self, *_: Any, **__: Any) -> None:
        """Start before the epoch's first batch is fetched, and again after a validation in the middle of an epoch."""
        if self._started_at is None and self._warmup_left == 0:
            self._started_at = perf_counter()

    on_train_epoch_start = on_train_batch_start = _start

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Batch, *_: Any) -> None:
        if self._warmup_left > 0:
            self._warmup_left -= 1
            if self._warmup_left == 0:
                _finish_queued_work(pl_module)
                self._start()
            return
        # The parts of a step are equally long, except that in a ragged last batch one image more or less may miss.
        self._num_images += len(batch.labels) * self._num_ranks
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (trainer.should_stop or step % every == 0) and step != self._logged_step:
            self._logged_step = step
            self._stop(trainer, pl_module)
            if self._elapsed_s > 0:
                pl_module.log(METRIC, self._num_images / self._elapsed_s, on_step=True, on_epoch=False, batch_size=1)
            self._num_images, self._elapsed_s = 0, 0.0
            self._start()

    def _stop(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._started_at is not None:
            _finish_queued_work(pl_module)
            self._elapsed_s += perf_counter() - self._started_at
            self._started_at = None

    on_validation_start = on_train_epoch_end = _stop


def _finish_queued_work(pl_module: LightningModule) -> None:
    if pl_module.device.type == "cuda":
        torch.cuda.synchronize(pl_module.device)


class StepBar(TQDMProgressBar):
    """Lightning's bar with the newest step's metrics; `prog_bar=True` would read them from a GPU in every step."""

    def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        return {name.removeprefix("train/"): f"{float(value):.3f}" for name, value in pl_module.step_metrics().items()}


class EpochLines(Callback):
    """Prints a line about each epoch: its means, images per second, and how long it took with its validation.

    A log file also gets a line each minute, as an epoch may take an hour.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the time of an epoch that is resumed in the middle, too."""
        self._started_at = self._printed_at = perf_counter()
        self._is_validated, self._began = False, trainer.global_step

    on_train_epoch_start = on_train_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_validated = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if perf_counter() - self._printed_at >= _LINE_EVERY_S and not sys.stdout.isatty():
            self._print(trainer, pl_module, {})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print(trainer, pl_module, trainer.callback_metrics)

    def _print(self, trainer: Trainer, pl_module: LightningModule, logged: Mapping[str, Any]) -> None:
        epoch, self._printed_at = trainer.current_epoch + 1, perf_counter()
        done = (trainer.fit_loop.epoch_loop.batch_idx + 1) / trainer.num_training_batches
        parts = [f"epoch {epoch}" + (f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else "")]
        parts.append("done" if done >= 1 and logged else f"{done:4.0%}")
        every = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]  # Lightning's own omission
        is_new = {"val/acc": self._is_validated, METRIC: trainer.global_step // every > self._began // every}
        for name, shown in _SHOWN.items():
            if name in logged and is_new.get(name, True):  # else it is of an epoch before
                parts.append(shown.format(float(logged[name])))
        parts.append(f"{self._printed_at - self._started_at:.0f} s")
        pl_module.print("  ".join(parts))  # above a bar, if there is one
        sys.stdout.flush()
