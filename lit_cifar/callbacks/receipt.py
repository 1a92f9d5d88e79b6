"""The data receipt of a run: in every checkpoint, and a line in `receipt.csv` for every epoch that it has proven."""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_cifar.callbacks.run_report import run_folder
from lit_cifar.csv_files import replace_csv
from lit_cifar.data.images import Batch
from lit_cifar.data.receipt import EMPTY, Receipt, Settings, Tally, chain, order_settings, prove
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.errors import ReceiptError

FILE_NAME = "receipt.csv"
COLUMNS = ("epoch", "steps", "samples", "digest")


class DataReceipt(Callback):
    """Proves that every epoch uses each sample of its plan once, and stops a run of which this is not true.

    What was used is counted on the device; it is summed over the processes and compared with the sampler's order only
    where a checkpoint is written and where an epoch ends. A checkpoint gets the digest of all samples used so far (see
    `lit_cifar.data.receipt`), `receipt.csv` in the run folder a line with the digest at the end of each epoch. Runs
    that have used the same samples in the same steps have the same digests, however they were divided or interrupted.

    Expects a `Batch`, and a data module with `train_sampler()`, `dataset` and `val_size`. All processes must take part
    when a checkpoint is written.

    Raises:
        ReceiptError: Samples are missing, were used twice or out of turn; the same on every process.
        ConfigError: A run is resumed in the middle of an epoch with settings that order its samples otherwise.
    """

    def __init__(self) -> None:
        self._tally: Tally | None = None  # None: not fitting, or in an epoch of whose beginning nothing is known
        self._digest = EMPTY  # before the tally's epoch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin at the epoch that comes next; a checkpoint that is loaded afterwards may know better."""
        self._digest = EMPTY
        self._tally = _new_tally(trainer, epoch=trainer.current_epoch) if stage == "fit" else None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on where the checkpoint's receipt ends."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        receipt = Receipt.read(checkpoint)
        if receipt is None:
            self._tally = None
            rank_zero_warn("the checkpoint has no data receipt: nothing is proven about the epoch it was written in")
            return
        sampler = _plan(trainer, epoch=receipt.epoch)
        receipt.check(sampler, _settings(trainer))
        self._digest = receipt.start
        self._tally = Tally.resumed(sampler, step=receipt.step, device=trainer.strategy.root_device)

    # Lightning comes here for every epoch but one that is resumed in its middle.

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After one of which nothing was known, begin again with this one."""
        if self._tally is None:
            self._tally = _new_tally(trainer, epoch=trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        """Count a batch, without waiting for the device."""
        tally = self._tally
        if tally is None:
            return
        if (trainer.current_epoch, batch_idx) != (tally.epoch, tally.loader_steps):
            raise ReceiptError(
                f"broken data receipt: training goes on with batch {batch_idx} of epoch {trainer.current_epoch}, where "
                f"batch {tally.loader_steps} of epoch {tally.epoch} comes next"
            )
        tally.count(batch.ids, accumulation=trainer.accumulate_grad_batches)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prove the epoch; where the run stops within it, the checkpoint that it leaves is proven as far as it goes."""
        tally = self._tally
        if tally is None or tally.epoch != trainer.current_epoch:
            return
        if tally.loader_steps == trainer.num_training_batches or not _stops(trainer):
            self._finish(trainer, tally)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Prove what was used so far, and write it down."""
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
        """Prove a whole epoch, report it, and begin the next."""
        num_batches = int(trainer.num_training_batches)
        uses = _proven(trainer, tally, loader_steps=num_batches)
        num_steps = _steps(trainer, num_batches)
        self._digest = chain(self._digest, uses, num_steps=num_steps)
        self._tally = _new_tally(trainer, epoch=tally.epoch + 1)
        folder = run_folder(trainer)
        if folder is not None and trainer.is_global_zero:
            write_epoch(folder, tally.epoch, num_steps, int(uses.count_nonzero()), self._digest)


def write_epoch(folder: Path, epoch: int, num_steps: int, num_samples: int, digest: str) -> None:
    """Put a line into `folder/receipt.csv`; lines of this epoch and later ones are of a run that was cut short.

    The file is replaced as a whole, so that nobody ever reads half a line.
    """
    path = folder / FILE_NAME
    rows: list[list[str]] = []
    if path.exists():
        with path.open(newline="") as old:
            rows = [row for row in csv.reader(old) if row and row[0].isdecimal() and int(row[0]) < epoch]
    folder.mkdir(parents=True, exist_ok=True)
    replace_csv(path, [COLUMNS, *rows, [epoch, num_steps, num_samples, digest]])


def _proven(trainer: Trainer, tally: Tally, *, loader_steps: int) -> Tensor:
    """What all shards have used, seen to be what they should have after so many batches; every process must call it."""
    # A copy, as the sum is taken in place.
    uses: Tensor = trainer.strategy.reduce(tally.uses.clone(), reduce_op="sum").cpu()
    prove(uses, _plan(trainer, epoch=tally.epoch), loader_steps=loader_steps)
    return uses


def _plan(trainer: Trainer, *, epoch: int) -> TrainSampler:
    """The sampler of an epoch."""
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
    sampler: TrainSampler = datamodule.train_sampler()
    sampler.set_epoch(epoch)
    return sampler


def _settings(trainer: Trainer) -> Settings:
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    return order_settings(datamodule.train_sampler(), dataset=datamodule.dataset, val_size=datamodule.val_size)


def _new_tally(trainer: Trainer, *, epoch: int) -> Tally:
    num_samples = _plan(trainer, epoch=epoch).num_samples
    return Tally(num_samples, epoch=epoch, device=trainer.strategy.root_device)


def _steps(trainer: Trainer, loader_steps: int) -> int:
    """Optimizer steps in so many batches; a limit on the batches of an epoch may cut its last step short."""
    whole, rest = divmod(loader_steps, trainer.accumulate_grad_batches)
    return whole + (rest > 0 and loader_steps >= trainer.num_training_batches)


def _stops(trainer: Trainer) -> bool:
    """Whether the run may end within an epoch."""
    return trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
