"""Speed and progress of a training: images per second, and a bar in a terminal or plain lines in a log file."""

import math
import sys
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lit_cifar.data.images import Batch
from lit_cifar.mode import mode_of

METRIC = "train/images_per_s"
# Later names win. Within an epoch the bar shows the last step's loss and accuracy, at its end those of the whole epoch.
EPOCH_NAMES = {"train/loss": "loss", "train/acc": "acc", "val/acc": "val", METRIC: "img/s"}
STEP_NAMES = EPOCH_NAMES | {"train/loss_step": "loss", "train/acc_step": "acc"}
_SHOW_EVERY_S = 0.5
_FIRST_LINE_S = 5.0


class Throughput(Callback):
    """Logs `train/images_per_s`: training images over all replicas per second of wall time.

    A window lasts from one log point (`trainer.log_every_n_steps`) to the next and is averaged as a whole. Its time
    includes what an image costs to be trained on: fetching and augmenting batches, transfer, forward, backward,
    optimizer step, and waiting for slower processes. It leaves out validation, checkpoints and figures between epochs,
    and the first `warmup_steps` of the fit, in which memory is allocated and kernels are chosen. The host waits for a
    GPU only at log points and when the clock stops, so that the time covers finished work.
    """

    def __init__(self, *, warmup_steps: int = 2) -> None:
        self.warmup_steps = warmup_steps
        self._warmup_left = warmup_steps
        self._num_ranks = 1
        self._num_images = 0
        self._elapsed_s = 0.0
        self._started_at: float | None = None  # None while the clock stands still
        self._logged_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._warmup_left, self._logged_step = self.warmup_steps, trainer.global_step
        self._num_ranks = mode_of(trainer.strategy).layout.data_parallel_size
        self._num_images, self._elapsed_s, self._started_at = 0, 0.0, None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start before the epoch's first batch is fetched."""
        self._start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start again after a validation in the middle of an epoch."""
        self._start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if self._warmup_left > 0:
            self._warmup_left -= 1
            if self._warmup_left == 0:
                _finish_queued_work(pl_module)
                self._start()
            return
        # The parts of a step are equally long, except that in a ragged last batch one image more or less may miss.
        self._num_images += len(batch.labels) * self._num_ranks
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and step % every == 0 and step != self._logged_step:
            self._logged_step = step
            self._log(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(pl_module)

    on_train_epoch_end = on_validation_start

    def _log(self, pl_module: LightningModule) -> None:
        self._stop(pl_module)
        if self._elapsed_s > 0:
            # With prog_bar=True Lightning would read the value back from the device in every step.
            pl_module.log(METRIC, self._num_images / self._elapsed_s, on_step=True, on_epoch=False, batch_size=1)
        self._num_images, self._elapsed_s = 0, 0.0
        self._start()

    def _start(self) -> None:
        if self._started_at is None and self._warmup_left == 0:
            self._started_at = perf_counter()

    def _stop(self, pl_module: LightningModule) -> None:
        if self._started_at is not None:
            _finish_queued_work(pl_module)
            self._elapsed_s += perf_counter() - self._started_at
            self._started_at = None


def _finish_queued_work(pl_module: LightningModule) -> None:
    if pl_module.device.type == "cuda":
        torch.cuda.synchronize(pl_module.device)


class ProgressBar(TQDMProgressBar):
    """Shows epoch, loss, accuracy and images per second; a line remains of a finished epoch.

    The bar is updated every `refresh_rate` steps, but at most twice a second, because the host waits for a GPU to have
    the values. If stdout is not a terminal there is no bar: a line is printed after each epoch, and at least every
    `line_every_s`. The values are those that the run logs, with or without `prog_bar=True`, by which Lightning would
    read a value back from the device in every step.
    """

    # All of it fits into 80 columns, where the bar itself gives way.
    BAR_FORMAT = "{desc} {n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}"

    def __init__(self, *, refresh_rate: int = 10, line_every_s: float = 60.0) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=True)
        self.line_every_s = line_every_s
        self._writes_lines = False
        self._start_at = self._epoch_at = self._line_at = 0.0
        self._first_batch: float | None = None  # number of batches before the first one of this run
        self._shown_at = -math.inf

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._writes_lines = trainer.is_global_zero and self.refresh_rate > 0 and not sys.stdout.isatty()
        if self._writes_lines:
            self.disable()

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Show nothing yet: each epoch opens its own bar. The time of a resumed epoch counts from here."""
        self._start_at = self._epoch_at = self._line_at = perf_counter()
        self._first_batch = None
        self.train_progress_bar = Tqdm(disable=True)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self._epoch_at = self._line_at = perf_counter()
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description_str(_epoch_of(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Open the bar of an epoch that was resumed in the middle, for which `on_train_epoch_start` is not called."""
        if self._first_batch is None:
            self._first_batch = trainer.current_epoch * trainer.num_training_batches + batch_idx
        if self.is_enabled and self.train_progress_bar.disable:
            self.on_train_epoch_start(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the bar, or write a line if one is due."""
        if not self._writes_lines:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            return
        now = perf_counter()
        if now - self._line_at >= min(self.line_every_s, max(_FIRST_LINE_S, self._line_at - self._start_at)):
            done = (batch_idx + 1) / trainer.num_training_batches
            self._write_line(trainer, self.get_metrics(trainer, pl_module), f"{done:4.0%}", done)

    def _should_update(self, current: int, total: int) -> bool:
        due = super()._should_update(current, total)
        if not due or (current < total and perf_counter() - self._shown_at < _SHOW_EVERY_S):
            return False
        self._shown_at = perf_counter()
        return True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put a line with the values of the whole epoch in the bar's place: a narrow terminal would cut a bar off."""
        self.train_progress_bar.leave = False
        self.train_progress_bar.close()
        if self._writes_lines or self.is_enabled:
            metrics = _short(trainer.callback_metrics, EPOCH_NAMES)
            done = (trainer.fit_loop.epoch_loop.batch_idx + 1) / trainer.num_training_batches
            if done < 1 or (trainer.current_epoch + 1) % (trainer.check_val_every_n_epoch or 1):
                metrics.pop("val", None)  # of an epoch before
            self._write_line(trainer, metrics, "done" if done >= 1 else f"{done:4.0%}", done)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        # These values are of this step, while the run logs them at its log points only.
        ask: Any = getattr(pl_module, "step_metrics", dict)
        return _short(trainer.callback_metrics | ask(), STEP_NAMES)

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above an open bar; if none is open, Lightning's own bar would print nothing."""
        bars = (self._train_progress_bar, self._val_progress_bar, self._test_progress_bar, self._predict_progress_bar)
        if any(bar is not None and not bar.disable for bar in bars):
            super().print(*args, sep=sep, **kwargs)
        else:
            print(*args, sep=sep, **kwargs)

    def _write_line(self, trainer: Trainer, metrics: dict[str, Any], label: str, done: float) -> None:
        """Write a line about the share of the epoch that is `done`, from 0 to 1."""
        self._line_at = perf_counter()
        figures = [f"{name} {value}" for name, value in metrics.items()]
        seconds = f"{self._line_at - self._epoch_at:.0f} s"
        left = self._left(trainer, (trainer.current_epoch + done) * trainer.num_training_batches)
        print("  ".join([_epoch_of(trainer), label, *figures, seconds + left]), flush=True)

    def _left(self, trainer: Trainer, batches: float) -> str:
        """The time that is left after so many batches of the training, as ", 0:12:30 left"; "" if it is not known."""
        epochs, steps = trainer.max_epochs or 0, trainer.max_steps  # the first limit ends it; -1 is none
        total = math.inf if epochs < 0 else epochs * trainer.num_training_batches
        total = total if steps < 0 else min(total, steps * trainer.accumulate_grad_batches)
        if not (self._first_batch is not None and self._first_batch < batches < total < math.inf):
            return ""
        each = (self._line_at - self._start_at) / (batches - self._first_batch)
        return f", {timedelta(seconds=round(each * (total - batches)))} left"


def _epoch_of(trainer: Trainer) -> str:
    known = trainer.max_epochs is not None and trainer.max_epochs > 0
    return f"epoch {trainer.current_epoch + 1}" + (f"/{trainer.max_epochs}" if known else "")


def _short(logged: dict[str, Any], names: dict[str, str]) -> dict[str, str]:
    figures = {short: float(logged[name]) for name, short in names.items() if name in logged}
    return {short: f"{value:.0f}" if short == "img/s" else f"{value:.3f}" for short, value in figures.items()}
