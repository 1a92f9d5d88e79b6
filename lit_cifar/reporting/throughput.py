"""Images per second of training, with a clock that runs only while there is training to measure."""

from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.batch_split import BatchSplit
from lit_cifar.data.images import Batch

METRIC = "train/images_per_s"


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
        self._warmup_left = self.warmup_steps
        self._num_ranks = BatchSplit.of(trainer.strategy).dp_size
        self._reset()
        self._started_at = None
        self._logged_step = trainer.global_step

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

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(pl_module)

    def _log(self, pl_module: LightningModule) -> None:
        self._stop(pl_module)
        if self._elapsed_s > 0:
            # Without prog_bar=True: Lightning would read the value back from the device in every step.
            pl_module.log(METRIC, self._num_images / self._elapsed_s, on_step=True, on_epoch=False, batch_size=1)
        self._reset()
        self._start()

    def _reset(self) -> None:
        self._num_images, self._elapsed_s = 0, 0.0

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
