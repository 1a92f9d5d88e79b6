"""The sample audit: proof that an epoch has used every sample once, and a digest of what was used in which step.

During the training every use is added to a tally on the device, and nothing waits for it. Where a checkpoint is
written or an epoch ends, what the ranks have used since the last time is summed and compared with the plan: the order
of the sampler.
What has passed is written down as a digest, SHA-256 chained over all optimizer steps of a run, each of which enters
with its ids in rising order. So two runs have the same digest if, and only if, each of their steps has used the same
samples, whatever the number of processes, the accumulation or the mode, and however often they were interrupted.
"""

from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.datamodule import OrderSettings, order_settings
from lit_cifar.data.images import Batch
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.errors import ConfigError, SampleAuditError, printable
from lit_cifar.reporting.files import read_csv, replace_csv
from lit_cifar.reporting.run_folder import run_folder

FILE_NAME = "sample_audit.csv"
EMPTY = sha256().hexdigest()  # the digest before the first step of a run
_COLUMNS = ("epoch", "steps", "samples", "digest")
_KEY = "sample_audit"
_USE = 2**32  # the low half of a tally's entry has room for the step
_MAX_IDS = 10
_TRAIN, _VAL = _FILES = ("train files", "val files")  # settings that are no flags: digests of lists of files
_PUT_BACK = "put them back as they were, with an empty file in place of each picture that could not be read then"


class SampleAudit(Callback):
    """Stops the run unless every epoch uses each sample of the sampler's order once.

    A checkpoint gets an `AuditRecord`, `sample_audit.csv` in the run folder a line with the digest after each epoch.
    """

    def __init__(self) -> None:
        self._tally: Tally | None = None  # None: not fitting, or in an epoch whose first samples are unknown
        self._start = self._digest = EMPTY  # before the tally's epoch, and after the steps that are proven

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._tally, self._start, self._digest = None, EMPTY, EMPTY

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        record = AuditRecord.read(checkpoint)
        data = trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
        if trainer.state.fn == TrainerFn.VALIDATING and record is not None and isinstance(data, CIFAR10DataModule):
            record.check_held_out(data)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if record is None:
            rank_zero_warn("the checkpoint has no sample audit: the samples of its epoch are not checked")
            return
        record.check(data)
        self._start, self._digest = record.start, record.digest
        self._tally = _tally(trainer, record.epoch, step=record.step)

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
        folder = run_folder(trainer)
        if folder is not None and trainer.is_global_zero:
            write_epoch(folder, tally.plan.epoch, tally.proven, tally.plan.num_due(num_batches), self._digest)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        tally = self._tally
        if tally is None:
            return
        self._prove(trainer, tally, loader_steps=tally.loader_steps)
        settings = order_settings(trainer.datamodule)  # type: ignore[attr-defined]
        AuditRecord(tally.plan.epoch, tally.proven, self._start, self._digest, settings).write(checkpoint)

    def _prove(self, trainer: Trainer, tally: "Tally", *, loader_steps: int) -> None:
        """Compare what all processes have used since the last time with the plan; every process must call this.

        Few samples are looked at, however large the data set is. If one is wrong, all are.
        """
        own, expected = tally.unproven(loader_steps)
        if not trainer.strategy.reduce(own, reduce_op="sum").cpu().equal(expected):
            # A copy, as the sum is taken in place.
            uses: Tensor = trainer.strategy.reduce(tally.uses.clone(), reduce_op="sum").cpu()
            raise failure(uses, tally.plan, loader_steps=loader_steps)
        ends = loader_steps >= trainer.num_training_batches  # a limit on them may shorten the last step
        self._digest = tally.proceed(self._digest, loader_steps=loader_steps, ends=ends)


class Plan:
    """What the sampler's order has planned for an epoch."""

    def __init__(self, sampler: TrainSampler) -> None:
        """Takes O(num_samples): the order is drawn."""
        self.epoch, self.num_steps = sampler.epoch, sampler.num_batches
        self.num_samples, self.accumulation = sampler.num_samples, sampler.accumulation
        self._order, self._batch_size = sampler.order(), sampler.batch_size
        self._data_parallel_size = sampler.layout.data_parallel_size

    def due(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The ids that all ranks together read in loader steps `first` to `last` - 1, and their optimizer steps from 1.

        Each int64, (n,), in the order of the steps.
        """
        begin, end = first // self.accumulation, min(-(-last // self.accumulation), self.num_steps)
        order = self._order[begin * self._batch_size : end * self._batch_size]
        positions = torch.arange(len(order))
        step, position = positions // self._batch_size + begin, positions % self._batch_size
        turn = step * self.accumulation + position // self._data_parallel_size % self.accumulation
        due = (first <= turn) & (turn < last)
        return order[due], step[due] + 1

    def num_due(self, loader_steps: int) -> int:
        """How many samples are read in so many loader steps."""
        whole = loader_steps // self.accumulation
        within = len(self.due(whole * self.accumulation, loader_steps)[0])
        return min(whole * self._batch_size, self.num_samples) + within

    def uses(self, loader_steps: int) -> Tensor:
        """What the tallies of all ranks should sum up to, as `Tally.uses`; no sample twice, whatever the order says."""
        ids, steps = self.due(0, loader_steps)
        uses = torch.zeros(self.num_samples, dtype=torch.int64)
        uses[ids] = _USE + steps
        return uses


class Tally:
    """One data-parallel rank's uses of an epoch's samples.

    `uses` is int64, (num_samples,): each use of a sample adds 2**32, and the optimizer step (from 1) in which it was
    used. So one sum over the ranks says how often, and of samples that were used once also when.
    """

    def __init__(self, sampler: TrainSampler, *, step: int = 0, device: torch.device) -> None:
        """The tally after `step` optimizer steps of `sampler.epoch`, which all count as the first rank's."""
        self.plan, self.proven = Plan(sampler), step  # optimizer steps
        self.loader_steps = step * sampler.accumulation
        self.num_uses = 0
        self.uses = torch.zeros(sampler.num_samples, dtype=torch.int64, device=device)
        self._one = torch.ones((), dtype=torch.int64, device=device)
        if step and sampler.layout.data_parallel_rank == 0:
            self.uses += self.plan.uses(self.loader_steps).to(device)
            self.num_uses = self.plan.num_due(self.loader_steps)

    def count(self, ids: Tensor, *, accumulation: int) -> None:
        """Add a batch; `ids` is int64, (n,), on the tally's device; n may be 0."""
        step = self.loader_steps // accumulation + 1
        self.uses.index_add_(0, ids, self._one.expand(len(ids)), alpha=_USE + step)  # a scalar: no copy to the device
        self.num_uses += len(ids)
        self.loader_steps += 1

    def unproven(self, loader_steps: int) -> tuple[Tensor, Tensor]:
        """This rank's uses of what is planned since the last proven step, and last the number of all its uses.

        And what the sums over the ranks should be, on the host. Each int64, (n + 1,).
        """
        ids, steps = self.plan.due(self.proven * self.plan.accumulation, loader_steps)
        own = torch.cat([self.uses[ids.to(self.uses.device)], self.uses.new_tensor([self.num_uses])])
        return own, torch.cat([_USE + steps, torch.tensor([self.plan.num_due(loader_steps)])])

    def proceed(self, digest: str, *, loader_steps: int, ends: bool) -> str:
        """Take whole optimizer steps as proven, or all if the epoch `ends` here; `digest` continued over them."""
        accumulation, first = self.plan.accumulation, self.proven
        self.proven = (loader_steps + (accumulation - 1) * ends) // accumulation
        ids, steps = self.plan.due(first * accumulation, min(loader_steps, self.proven * accumulation))
        return chain(digest, ids, steps, first=first, last=self.proven)


@dataclass(frozen=True)
class AuditRecord:
    """What a checkpoint says about the samples that were used until it was written.

    It needs no list of them: no other samples have this digest.
    """

    epoch: int
    step: int  # whole optimizer steps taken in it
    start: str  # digest before the epoch's first step
    digest: str  # digest after its latest step
    settings: OrderSettings  # of the data module

    def write(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_KEY] = asdict(self)

    @classmethod
    def read(cls, checkpoint: dict[str, Any]) -> "AuditRecord | None":
        found = checkpoint.get(_KEY)
        if found is None:
            return None
        settings = {name: printable(v) if isinstance(v, str) else v for name, v in found["settings"].items()}
        return cls(**found | {"settings": settings})

    def check(self, data: Any) -> None:
        """Refuse to resume in the middle of an epoch unless this run's plan for it begins with what was used.

        And `check_held_out`. `data` is the run's data module.
        """
        if not self.step:
            self.check_held_out(data)
            return
        settings = order_settings(data)
        written = f"the checkpoint was written after {self.step} optimizer steps of epoch {self.epoch}"
        if self.settings.get(_TRAIN, settings.get(_TRAIN)) != settings.get(_TRAIN):
            raise ConfigError(
                f"{written}; since then files to train on were added, removed or renamed, or others can be read",
                remedy=_PUT_BACK,
            )
        names = [name for name, value in settings.items() if name not in _FILES and self.settings.get(name) != value]
        if names:
            then = _flags({name: value for name, value in self.settings.items() if name in names})
            # Between two epochs the order may change, what is held out may not.
            other = "start a new training" if self._mixed(data) else "resume a checkpoint from between two epochs"
            raise ConfigError(
                f"{written} with {then}; {_flags({name: settings[name] for name in names})} would order the rest of "
                "it otherwise",
                remedy=f"pass {then}, or {other}",
            )
        sampler = data.train_sampler()
        sampler.set_epoch(self.epoch)
        due = Plan(sampler).due(0, self.step * sampler.accumulation)
        if chain(self.start, *due, first=0, last=self.step) != self.digest:
            raise ConfigError(
                f"{written}, whose samples are not those that the same settings give here",
                remedy="resume with the version of lit_cifar that wrote it, or a checkpoint from between two epochs",
            )
        self.check_held_out(data)

    def _mixed(self, data: Any) -> list[str]:
        """The settings by which images that were trained on would be validated on.

        A smaller `val_size` holds out a part of the same ones. Files that the user has put into a folder to validate on
        may be any, unless some to train on are gone.
        """
        now, then, own = order_settings(data), self.settings, data.source.own_val
        names = _FILES if own else (*_FILES, "num_train", "seed", "val_size")
        others = [name for name in names if then.get(name) != now.get(name)]
        if "val_size" in others and str(then.get("val_size")).isdecimal() and int(then["val_size"]) > data.val_size:
            others.remove("val_size")
        return [] if not data.val_size or (own and (len(others) == 1 or _TRAIN not in then)) else others

    def check_held_out(self, data: Any) -> None:
        """Refuse to validate on images that were trained on."""
        now, then, others = order_settings(data), self.settings, self._mixed(data)
        if not others:
            return
        reason = "files were added, removed or moved, or others can be read, or it is of an earlier release"
        remedy = _PUT_BACK
        if not {*_FILES} & {*others}:
            reason, given = (_flags({name: each[name] for name in others if name in each}) for each in (now, then))
            remedy = f"pass {given}"
        raise ConfigError(
            f"images that the checkpoint was trained on would be validated on: {reason}",
            remedy=f"{remedy}, or start a new training",
        )


def failure(uses: Tensor, plan: Plan, *, loader_steps: int) -> SampleAuditError:
    """What differs between `uses`, the sum of the tallies of all ranks, and the plan."""
    planned = plan.uses(loader_steps)
    times, due = uses // _USE, planned > 0
    faults = {
        "missing": due & (times == 0),
        "used more than once": times > 1,
        "used in another step than planned": (times == 1) & (uses != planned),
    }
    return SampleAuditError(
        f"the sample audit of epoch {plan.epoch} fails after {-(-loader_steps // plan.accumulation)} of "
        f"{plan.num_steps} optimizer steps\n"
        + "\n".join(f"{fault}: {_listed(mask)}" for fault, mask in faults.items() if mask.any())
    )


def chain(digest: str, ids: Tensor, steps: Tensor, *, first: int, last: int) -> str:
    """`digest` (hexadecimal) continued over optimizer steps `first` to `last` - 1 of an epoch.

    `ids` and `steps` are those of `Plan.due`.
    """
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


def _listed(mask: Tensor) -> str:
    """How many samples, and the first ids of them."""
    ids = mask.nonzero().flatten().tolist()
    more = ", ..." if len(ids) > _MAX_IDS else ""
    return f"{len(ids)} samples, ids {', '.join(map(str, ids[:_MAX_IDS]))}{more}"


def _flags(settings: OrderSettings) -> str:
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
    return " ".join(f"--data.{name}={value}" for name, value in values.items())
