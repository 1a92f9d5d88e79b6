"""The data receipt of a run: an entry in every checkpoint, and a line in `receipt.csv` for every checked epoch."""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_cifar.checkpoint.sample_audit.digest import EMPTY, OrderSettings, Receipt, Tally, chain, order_settings, prove
from lit_cifar.data.images import Batch
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.errors import SampleAuditError
from lit_cifar.reporting.files import replace_csv
from lit_cifar.reporting.run_folder import run_folder

FILE_NAME = "receipt.csv"
COLUMNS = ("epoch", "steps", "samples", "digest")


class SampleAudit(Callback):
    """Checks that every epoch uses each sample of the sampler's order once, and stops the run if not.

    The used samples are counted on the device. Their counts are summed over the processes, and compared with the
    sampler's order, when a checkpoint is written, in which all processes take part, and when an epoch ends. A
    checkpoint gets the digest of all samples used so far (see `digest` beside this file), `receipt.csv` in the run
    folder a line with the digest after each epoch. Runs that have used the same samples in the same steps have the
    same digests, in any mode and however often they were interrupted.
    """

    def __init__(self) -> None:
        self._tally: Tally | None = None  # None: not fitting, or in an epoch whose first samples are unknown
        self._digest = EMPTY  # before the tally's epoch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start with the next epoch; a checkpoint that is loaded afterwards replaces this."""
        self._digest = EMPTY
        self._tally = _new_tally(trainer, epoch=trainer.current_epoch) if stage == "fit" else None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        receipt = Receipt.read(checkpoint)
        if receipt is None:
            self._tally = None
            rank_zero_warn("the checkpoint has no data receipt: the samples of its epoch are not checked")
            return
        sampler = _plan(trainer, epoch=receipt.epoch)
        receipt.check(sampler, _settings(trainer))
        self._digest = receipt.start
        self._tally = Tally.resumed(sampler, step=receipt.step, device=trainer.strategy.root_device)

    # Lightning calls this for every epoch except one that is resumed in the middle.

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with this epoch if the samples of the previous one were unknown."""
        if self._tally is None:
            self._tally = _new_tally(trainer, epoch=trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        tally = self._tally
        if tally is None:
            return
        if (trainer.current_epoch, batch_idx) != (tally.epoch, tally.loader_steps):
            raise SampleAuditError(
                f"broken data receipt: training continues with batch {batch_idx} of epoch {trainer.current_epoch}, but "
                f"batch {tally.loader_steps} of epoch {tally.epoch} is next"
            )
        tally.count(batch.ids, accumulation=trainer.accumulate_grad_batches)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the epoch. If the run stops within it, its checkpoint is checked instead."""
        tally = self._tally
        if tally is None or tally.epoch != trainer.current_epoch:
            return
        stops = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        if tally.loader_steps == trainer.num_training_batches or not stops:
            self._finish(trainer, tally)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        tally = self._tally
        if tally is None:
            return
        uses = _proven(trainer, tally, loader_steps=tally.loader_steps)
        step = _steps(trainer, tally.loader_steps)
        receipt = Receipt(
            epoch=tally.epoch,
            step=step,
            start=self._digest,
            digest=chain(self._digest, uses, num_steps=step),
            settings=_settings(trainer),
        )
        receipt.write(checkpoint)

    def _finish(self, trainer: Trainer, tally: Tally) -> None:
        num_batches = int(trainer.num_training_batches)
        uses = _proven(trainer, tally, loader_steps=num_batches)
        num_steps = _steps(trainer, num_batches)
        self._digest = chain(self._digest, uses, num_steps=num_steps)
        self._tally = _new_tally(trainer, epoch=tally.epoch + 1)
        folder = run_folder(trainer)
        if folder is not None and trainer.is_global_zero:
            write_epoch(folder, tally.epoch, num_steps, int(uses.count_nonzero()), self._digest)


def write_epoch(folder: Path, epoch: int, num_steps: int, num_samples: int, digest: str) -> None:
    """Write a line into `folder/receipt.csv`, in place of an interrupted run's lines for this epoch and later ones.

    The file is replaced as a whole, so that a reader never sees half a line.
    """
    path = folder / FILE_NAME
    rows: list[list[str]] = []
    if path.exists():
        with path.open(newline="") as old:
            rows = [row for row in csv.reader(old) if row and row[0].isdecimal() and int(row[0]) < epoch]
    folder.mkdir(parents=True, exist_ok=True)
    replace_csv(path, [COLUMNS, *rows, [epoch, num_steps, num_samples, digest]])


def _proven(trainer: Trainer, tally: Tally, *, loader_steps: int) -> Tensor:
    """How often all processes have used each sample, checked against the order; every process must call this."""
    # A copy, as the sum is taken in place.
    uses: Tensor = trainer.strategy.reduce(tally.uses.clone(), reduce_op="sum").cpu()
    prove(uses, _plan(trainer, epoch=tally.epoch), loader_steps=loader_steps)
    return uses


def _plan(trainer: Trainer, *, epoch: int) -> TrainSampler:
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
    sampler: TrainSampler = datamodule.train_sampler()
    sampler.set_epoch(epoch)
    return sampler


def _settings(trainer: Trainer) -> OrderSettings:
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    return order_settings(datamodule.train_sampler(), dataset=datamodule.dataset, val_size=datamodule.val_size)


def _new_tally(trainer: Trainer, *, epoch: int) -> Tally:
    num_samples = _plan(trainer, epoch=epoch).num_samples
    return Tally(num_samples, epoch=epoch, device=trainer.strategy.root_device)


def _steps(trainer: Trainer, loader_steps: int) -> int:
    """Optimizer steps in `loader_steps` batches; a limit on an epoch's batches may shorten its last step."""
    whole, rest = divmod(loader_steps, trainer.accumulate_grad_batches)
    return whole + (rest > 0 and loader_steps >= trainer.num_training_batches)
