"""The sample audit: proof that an epoch has used every sample as planned, and a digest of the uses in each step.

During the training every use is added to a tally on the device, and nothing waits for it. When a checkpoint is written
or an epoch ends, the ranks' tallies are summed and compared with the plan: the order of the sampler, which has each
sample once, unless `--data.balance.draw_equally=true` draws some several times. Steps that agree are written down as a
digest, SHA-256 chained over all optimizer steps of a run, each with its ids in rising order. So two runs have the same
digest if, and only if, each of their steps has used the same samples, however they were cut or interrupted.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_cifar.checkpoint.content import check_content
from lit_cifar.checkpoint.format import POSITION
from lit_cifar.data.datamodule import batches_of_epoch
from lit_cifar.data.images import Batch
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.errors import CheckpointError, SampleAuditError
from lit_cifar.reporting.files import read_csv, replace_csv
from lit_cifar.reporting.run_folder import run_folder

FILE_NAME = "sample_audit.csv"
EMPTY = sha256().hexdigest()  # the digest before the first step of a run
_COLUMNS = ("epoch", "steps", "samples", "digest")
_KEY = "sample_audit"
_USE = 2**32  # the low half of a tally's entry has room for the step
_MAX_IDS = 10


class SampleAudit(Callback):
    """Stops the run unless every epoch uses the samples of the sampler's order, each as often as it is there.

    A checkpoint gets an `AuditRecord`, `sample_audit.csv` in the run folder a line with the digest after each epoch.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._tally: Tally | None = None  # None: not fitting, or in an epoch whose first samples are unknown
        self._start = self._digest = EMPTY  # digests before the tally's epoch, and after the steps that are proven

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if (record := AuditRecord.read(checkpoint)) is None:
            rank_zero_warn("the checkpoint has no sample audit: the samples of its epoch are not checked")
            return
        if record.epoch < checkpoint.get(POSITION, {}).get("epoch", 0):  # saved behind the epoch's end: the next begins
            record = AuditRecord(record.epoch + 1, 0, record.digest, record.digest)
        tally = _tally(trainer, record.epoch, step=record.step)
        record.check(tally.plan)
        self._tally, self._start, self._digest = tally, record.start, record.digest

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with this epoch. Lightning does not call this for one that is resumed in the middle."""
        if self._tally is None:
            self._tally = _tally(trainer, trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        if self._tally is not None:
            self._tally.count(batch.ids, accumulation=trainer.accumulate_grad_batches)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the epoch. If the run stops within it, its checkpoint is checked instead."""
        tally = self._tally
        if tally is None or tally.plan.epoch != trainer.current_epoch:
            return
        num_batches = int(trainer.num_training_batches)
        stops = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        if stops and tally.loader_steps != num_batches:
            return
        self._prove(trainer, tally, loader_steps=num_batches)
        self._start = self._digest
        self._tally = _tally(trainer, tally.plan.epoch + 1)
        if (folder := run_folder(trainer)) is not None and trainer.is_global_zero:
            num_samples = int((tally.plan.uses(num_batches) // _USE).sum())
            write_epoch(folder, tally.plan.epoch, tally.proven, num_samples, self._digest)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if (tally := self._tally) is not None:
            self._prove(trainer, tally, loader_steps=tally.loader_steps)
            checkpoint[_KEY] = asdict(AuditRecord(tally.plan.epoch, tally.proven, self._start, self._digest))

    def _prove(self, trainer: Trainer, tally: "Tally", *, loader_steps: int) -> None:
        """Compare what all processes have used in the epoch with the plan; every process must call this."""
        uses: Tensor = trainer.strategy.reduce(tally.uses.clone(), reduce_op="sum").cpu()  # which works in place
        if not uses.equal(tally.plan.uses(loader_steps)):
            raise failure(uses, tally.plan, loader_steps=loader_steps)
        loader_steps = min(loader_steps, batches_of_epoch(trainer))  # an error may have ended the newest one
        ends = loader_steps >= trainer.num_training_batches  # a limit on them may shorten the last step
        self._digest = tally.proceed(self._digest, loader_steps=loader_steps, ends=ends)


class Plan:
    """The uses of samples that the sampler's order plans for an epoch."""

    def __init__(self, sampler: TrainSampler) -> None:
        """Draw the order, which takes O(num_samples)."""
        self.epoch, self.num_steps = sampler.epoch, sampler.num_batches
        self.num_samples, self.accumulation = sampler.num_samples, sampler.accumulation
        self._order, self._batch_size = sampler.order(), sampler.batch_size
        self._data_parallel_size = sampler.layout.data_parallel_size
        self._repeats = sampler.balanced is not None

    def due(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Ids that all ranks read in loader steps `first` to `last` - 1, and their steps from 1; int64, (n,)."""
        begin, end = first // self.accumulation, min(-(-last // self.accumulation), self.num_steps)
        order = self._order[begin * self._batch_size : end * self._batch_size]
        positions = torch.arange(len(order))
        step, position = positions // self._batch_size + begin, positions % self._batch_size
        turn = step * self.accumulation + position // self._data_parallel_size % self.accumulation
        due = (first <= turn) & (turn < last)
        return order[due], step[due] + 1

    def uses(self, loader_steps: int) -> Tensor:
        """The planned sum of `Tally.uses` over all ranks; no sample is used twice unless classes are balanced."""
        ids, steps = self.due(0, loader_steps)
        uses = torch.zeros(self.num_samples, dtype=torch.int64)
        return uses.index_add_(0, ids, _USE + steps) if self._repeats else uses.index_copy_(0, ids, _USE + steps)


class Tally:
    """One data-parallel rank's uses of an epoch's samples.

    `uses` is int64, (num_samples,): each use of a sample adds 2**32, and the optimizer step (from 1) in which it was
    used. So one sum over the ranks tells how often, and for a sample that was used once also when.
    """

    def __init__(self, sampler: TrainSampler, *, step: int = 0, device: torch.device) -> None:
        """The tally after `step` optimizer steps of `sampler.epoch`, which all count as the first rank's."""
        self.plan, self.proven = Plan(sampler), step  # `proven` counts optimizer steps
        self.loader_steps = step * sampler.accumulation
        self.uses = torch.zeros(sampler.num_samples, dtype=torch.int64, device=device)
        self._one = torch.ones((), dtype=torch.int64, device=device)
        if step and sampler.layout.data_parallel_rank == 0:
            self.uses += self.plan.uses(self.loader_steps).to(device)

    def count(self, ids: Tensor, *, accumulation: int) -> None:
        """Add a batch; `ids` is int64, (n,), on the tally's device; n may be 0."""
        step = self.loader_steps // accumulation + 1
        self.uses.index_add_(0, ids, self._one.expand(len(ids)), alpha=_USE + step)  # a scalar: no copy to the device
        self.loader_steps += 1

    def proceed(self, digest: str, *, loader_steps: int, ends: bool) -> str:
        """Take whole optimizer steps as proven, or all if the epoch `ends` here; `digest` continued over them."""
        accumulation, first = self.plan.accumulation, self.proven
        self.proven = (loader_steps + (accumulation - 1) * ends) // accumulation
        ids, steps = self.plan.due(first * accumulation, min(loader_steps, self.proven * accumulation))
        return chain(digest, ids, steps, first=first, last=self.proven)


@dataclass(frozen=True)
class AuditRecord:
    """The entry of a checkpoint about the samples that were used until it was written: no others have this digest."""

    epoch: int
    step: int  # whole optimizer steps taken in the epoch
    start: Annotated[str, "[0-9a-f]{64}"]  # digest before the epoch's first step
    digest: Annotated[str, "[0-9a-f]{64}"]  # digest after its latest step

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> "AuditRecord | None":
        if (found := checkpoint.get(_KEY)) is None:
            return None
        check_content(found, cls, _KEY)
        return cls(**found)

    def agrees_with(self, epoch: int, step: int) -> bool:
        """Whether a checkpoint with that position can hold it.

        A short last step of an epoch is proven, and not counted. An epoch may have ended before this knows.
        """
        return (self.epoch == epoch and self.step - step in (0, 1)) or (self.epoch == epoch - 1 and not step)

    def check(self, plan: Plan) -> None:
        """Refuse to go on unless this run's plan for the epoch begins with what was used."""
        due = plan.due(0, self.step * plan.accumulation)
        if chain(self.start, *due, first=0, last=self.step) != self.digest:
            problem = f"samples of {self.step} steps of epoch {self.epoch} are not those that the same settings give"
            raise CheckpointError(problem, remedy="resume a checkpoint from between two epochs")


def failure(uses: Tensor, plan: Plan, *, loader_steps: int) -> SampleAuditError:
    planned = plan.uses(loader_steps)
    times, wanted = uses // _USE, planned // _USE
    missing, too_often = times < wanted, times > wanted.clamp(min=1)
    faults = {
        "missing": missing,
        "used too often": too_often,
        "used in another step than planned": (uses != planned) & ~missing & ~too_often,
    }
    steps = f"{-(-loader_steps // plan.accumulation)} of {plan.num_steps} optimizer steps"
    found = []
    for fault, ids in ((fault, mask.nonzero().flatten().tolist()) for fault, mask in faults.items() if mask.any()):
        shown = [*map(str, ids[:_MAX_IDS]), *["..."] * (len(ids) > _MAX_IDS)]
        found.append(f"{fault}: {len(ids)} samples, ids {', '.join(shown)}")
    return SampleAuditError("\n".join([f"the sample audit of epoch {plan.epoch} fails after {steps}", *found]))


def chain(digest: str, ids: Tensor, steps: Tensor, *, first: int, last: int) -> str:
    """`digest` (hexadecimal) continued over optimizer steps `first` to `last` - 1, with what `Plan.due` returns."""
    sizes = torch.bincount(steps - first, minlength=last - first + 1)[1:].tolist()
    for of_step in torch.split(ids, sizes):
        digest = sha256(bytes.fromhex(digest) + of_step.sort().values.numpy().astype("<i8").tobytes()).hexdigest()
    return digest


def write_epoch(folder: Path, epoch: int, num_steps: int, num_samples: int, digest: str) -> None:
    """Write a line into `sample_audit.csv`, in place of an interrupted run's lines for this epoch and later ones."""
    path = folder / FILE_NAME
    rows = [row for row in read_csv(path) if row and row[0].isdecimal() and int(row[0]) < epoch]
    folder.mkdir(parents=True, exist_ok=True)
    replace_csv(path, [_COLUMNS, *rows, [epoch, num_steps, num_samples, digest]])


def _tally(trainer: Trainer, epoch: int, *, step: int = 0) -> Tally:
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
    sampler: TrainSampler = datamodule.train_sampler()
    sampler.set_epoch(epoch)
    return Tally(sampler, step=step, device=trainer.strategy.root_device)
