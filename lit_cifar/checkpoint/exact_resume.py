"""A resumed run continues with the next sample, even in a different mode or on more or fewer processes.

Order, augmentation and schedule are functions of (seed, epoch, step). Beside weights, optimizer and schedule a
checkpoint must therefore hold the position in the epoch, and the counts of the epoch's metrics until then.
"""

import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer, WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_sum

from lit_cifar.checkpoint.content import check_content
from lit_cifar.checkpoint.format import AVERAGED, METRICS, POSITION, STOPPED, class_path
from lit_cifar.data.datamodule import batches_of_epoch
from lit_cifar.data.loader import BatchLoader
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.errors import CheckpointError
from lit_cifar.launch.signals import end_together
from lit_cifar.mode import mode_of


class StartingPoint(NamedTuple):
    digest: str | None  # of the file; None for no checkpoint
    text: str  # file and position, or why there is none
    host: str = socket.gethostname()


class SameStart(Callback):
    """Compares the starts of all processes once they have met, and ends all if one differs from rank 0's."""

    def __init__(self, start: StartingPoint) -> None:
        self._start = start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or not dist.is_initialized():
            return
        starts: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(starts, self._start)
        other = next((rank for rank, start in enumerate(starts) if start.digest != starts[0].digest), None)
        if other is not None:
            both = [f"  rank {rank} on {starts[rank].host}: {starts[rank].text}" for rank in (0, other)]
            remedy = "  let every machine see the same files, then start again"
            problem = "error: the processes would start from different checkpoints"
            end_together(trainer, "\n".join([problem, *both, remedy]), status=2)


@dataclass(frozen=True, kw_only=True)
class Position:
    epoch: int  # number of complete epochs
    step: int  # optimizer steps taken in the current epoch
    started: bool  # whether the current epoch has begun
    global_step: int  # optimizer steps taken in all epochs
    rows: int = 0  # lines of `metrics.csv` written so far, without its header
    validates: bool = False  # whether a validation that is due after the newest batch is still to come

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> "Position":
        """The position in a checkpoint; a `CheckpointError` if it contradicts Lightning's own counts, or itself."""
        check_content(checkpoint.get(POSITION), cls, POSITION)
        found = cls(**checkpoint[POSITION])
        epochs, steps = checkpoint.get("epoch", found.epoch), checkpoint.get("global_step", found.global_step)
        # Lightning counts an epoch after its last hooks; one that `max_steps` ends inside counts for it, and not here.
        follows = found.epoch - epochs in ((0, -1) if found.started else (0, -1, 1))
        if not follows or not found.epoch + found.step <= found.global_step == steps:
            place = f"step {found.step} of epoch {found.epoch} after {found.global_step} optimizer steps"
            raise CheckpointError(f"its position, {place}, contradicts its epoch={epochs} and global_step={steps}")
        return found

    @classmethod
    def reached_by(cls, trainer: Trainer, *, validates: bool) -> "Position":
        """The position of `trainer`, at a step boundary, within a validation, or after an epoch or the training."""
        epochs: Any = trainer.fit_loop.epoch_progress.current
        newest: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        batches = batches_of_epoch(trainer)
        # A fit that `max_steps` ended in the middle of an epoch has run that epoch's last hooks too.
        complete = epochs.processed == epochs.started and batches >= trainer.num_training_batches
        return cls(
            epoch=epochs.started if complete else max(epochs.started - 1, 0),
            step=0 if complete else batches // trainer.accumulate_grad_batches,
            started=epochs.started > 0 and not complete and batches > 0,
            global_step=trainer.global_step,
            rows=_num_rows(trainer),
            validates=validates or newest.completed < newest.processed,
        )

    def write(self, loops: dict[str, Any], *, accumulation: int) -> None:
        """Write this position into `loops`, the "fit_loop" entry, which counts batches: `accumulation` for a step."""
        entered = self.epoch + self.started
        epochs = {"ready": entered, "started": entered, "processed": self.epoch, "completed": self.epoch}
        loops["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
        loops["epoch_loop.batch_progress"] = {
            "total": _completed(self.global_step * accumulation),
            "current": _completed(self.step * accumulation),
            "is_last_batch": False,
        }
        # Lightning makes a validation that has begun and made no batch, if one is due; it then counts the step.
        begun = _completed(0) | dict.fromkeys(("ready", "started"), int(self.validates))
        loops["epoch_loop.val_loop.batch_progress"] |= {"total": begun, "current": _completed(0)}
        loops["epoch_loop.state_dict"] = {"_batches_that_stepped": self.global_step - self.validates}
        loops["state_dict"] = {}


class ExactResume(Callback):
    """Writes position, metrics' counts and what has ended the training into every checkpoint, and resumes from them."""

    def __init__(self) -> None:
        self._resumed: Position | None = None  # where this run begins, until its first step
        self._trained: dict[str, Tensor] | None = None  # the weights at the end, if the module then has their average
        # Counts of an epoch within which the training ends: Lightning forgets them before the last checkpoint.
        self._counts: dict[str, dict[str, Tensor]] | None = None
        self._patience: dict[str, Any] = {}  # states before that end, at which EarlyStopping counts an epoch too many
        self._validated = False  # whether a validation has ended since the newest batch
        self._swapped = False  # whether the module has the average, for a validation, and the average the weights
        self._made: dict[int, dict[str, Any]] = {}  # attributes of the callbacks before the fit, by their ids

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the end of a training keep its weights, over which Lightning copies their average."""
        if stage == "fit":
            vars(self).update(vars(ExactResume()))
            self._made = {id(each): {**vars(each)} for each in _callbacks(trainer)}
            for average in _callbacks(trainer, WeightAveraging):
                average._copy_average_to_current = partial(self._end, average)
                average._swap_models = partial(self._swap, average)
                average.should_update = partial(_should_update, average, trainer)

    def _end(self, average: WeightAveraging, pl_module: LightningModule) -> None:
        weights = pl_module.trainer.strategy.lightning_module_state_dict()
        self._trained = {name: tensor.clone() for name, tensor in weights.items()}
        type(average)._copy_average_to_current(average, pl_module)

    def _swap(self, average: WeightAveraging, pl_module: LightningModule) -> None:
        type(average)._swap_models(average, pl_module)
        self._swapped = not self._swapped

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write position, counts, and the logs, which belong to a checkpoint, to the disk."""
        if self._swapped:
            checkpoint["state_dict"], checkpoint[AVERAGED] = checkpoint[AVERAGED], checkpoint["state_dict"]
        if self._trained is not None:
            checkpoint[AVERAGED] = self._trained
        stopped = [_limits(trainer), *map(self._settings, _deciders(trainer))]
        checkpoint[STOPPED] = stopped if trainer.should_stop else None
        for logger in trainer.loggers:
            logger.save()
        fails = trainer.interrupted and trainer.validating and trainer.state.fn == TrainerFn.FITTING
        position = Position.reached_by(trainer, validates=fails and not self._validated)
        checkpoint[POSITION] = asdict(position)
        checkpoint[METRICS] = _collect(trainer, pl_module) if self._counts is None else self._counts
        checkpoint["callbacks"] |= self._patience
        batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if position.started and (batch.started > batch.processed or batch.processed % trainer.accumulate_grad_batches):
            repeats = "a run that goes on from it repeats batches, which statistics and means then count twice"
            rank_zero_warn(f"this checkpoint is written within an optimizer step: {repeats}")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Resume a fit at the position. A checkpoint without one is left to Lightning."""
        if trainer.state.fn != TrainerFn.FITTING or POSITION not in checkpoint:
            return
        stopped, now = checkpoint.get(STOPPED), [_limits(trainer), *map(self._settings, _callbacks(trainer))]
        # What has decided to end the training would decide so again, unless its settings are other ones.
        trainer.should_stop = stopped is not None and all(settings in now for settings in stopped)
        for stopping in _callbacks(trainer, EarlyStopping):
            state = checkpoint["callbacks"].get(stopping.state_key, {})
            state["patience"] = stopping.patience  # the state would replace the user's setting
            if not trainer.should_stop:
                state |= {"stopping_reason": EarlyStoppingReason.NOT_STOPPED.value, "stopping_reason_message": None}
        position = Position.read(checkpoint)
        position.write(checkpoint["loops"]["fit_loop"], accumulation=trainer.accumulate_grad_batches)
        counts = checkpoint[METRICS]
        if not position.started:  # nothing resets those of the network
            counts = {name: each for name, each in counts.items() if name.startswith("network.")}
        _restore(pl_module, counts, data_parallel_rank=mode_of(trainer.strategy).layout.data_parallel_rank)
        self._resumed = position

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what time is left, and let our loader refuse, if Lightning made it before it read the checkpoint."""
        if self._resumed is None:
            return
        for timer in _callbacks(trainer, Timer):
            left, used = (timedelta(seconds=round(s)) for s in (timer.time_remaining() or 0, timer.time_elapsed()))
            rank_zero_info(f"--trainer.max_time: {left} are left, as the training before has taken {used}")
        loader: Any = trainer.train_dataloader
        if isinstance(loader, BatchLoader) and self._resumed.step:
            loader.load_state_dict({})
        if isinstance(loader, BatchLoader) and self._resumed.global_step:
            _settle_buckets(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._counts, self._patience = None, {}

    # After a validation Lightning's loop makes an empty pass and counts it: loggers would write each value a step late.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._validated = False
        self._correct_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct the loggers' step, and let ReduceLROnPlateau step if its metric is known."""
        self._correct_step(trainer)
        if batches_of_epoch(trainer) < trainer.num_training_batches:
            self._counts = _collect(trainer, pl_module)
            self._patience = {each.state_key: each.state_dict() for each in _callbacks(trainer, EarlyStopping)}
        monitors = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if all(monitor in trainer.callback_metrics for monitor in monitors):
            trainer.fit_loop._restarting = False  # otherwise Lightning skips the schedule at the end of this epoch

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what has ended the training, unless a run that did something has reached its length."""
        if trainer.should_stop:
            names = {type(callback).__name__ for callback in _deciders(trainer)} or {"trainer.should_stop"}
            told = ", ".join(sorted(names)).replace("Timer", "--trainer.max_time, which counts earlier runs too")
            ended = f"the training has ended after {trainer.global_step} optimizer steps by {told}"
            rank_zero_info(f"{ended}; to go on, resume with another setting of that")
        elif self._resumed is not None:
            flags = " ".join(f"--trainer.{name}={value}" for name, value in _limits(trainer).items())
            rank_zero_info(f"nothing is left to train with {flags}; to go on, resume with more")

    def _settings(self, callback: Callback) -> dict[str, Any]:
        """The class of `callback`, and its simple arguments before the fit, or attributes if it does not keep all."""
        own, names = self._made.get(id(callback), vars(callback)), signature(type(callback)).parameters
        kept = {name: own.get(name, own.get(f"_{name}")) for name in names}
        if any(name not in own and f"_{name}" not in own for name in names):
            kept = own
        simple = {name: value for name, value in kept.items() if type(value) in (bool, int, float, str)}  # no Enum
        return {"class_path": class_path(callback)} | simple

    def _correct_step(self, trainer: Trainer) -> None:
        if self._resumed is not None:
            trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
            self._resumed = None


def _callbacks(trainer: Trainer, kind: type[Callback] = Callback) -> list[Any]:
    return [each for each in trainer.callbacks if isinstance(each, kind)]  # type: ignore[attr-defined]


def _limits(trainer: Trainer) -> dict[str, Any]:
    limits = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
    return {name: value for name, value in limits.items() if value not in (None, -1)}


def _deciders(trainer: Trainer) -> list[Callback]:
    """The callbacks that have ended a training, or that may have: of a user's own nobody knows."""
    found = [timer for timer in _callbacks(trainer, Timer) if (timer.time_remaining() or 0) <= 0]
    found += [each for each in _callbacks(trainer, EarlyStopping) if each.stopping_reason_message is not None]
    own = ("lightning", "lit_cifar")
    return found or [each for each in _callbacks(trainer) if type(each).__module__.partition(".")[0] not in own]


def _should_update(average: WeightAveraging, trainer: Trainer, **index: int) -> bool:
    """Whether an average counts this step or epoch. Lightning also asks where a limit ends a fit within an epoch."""
    is_cut = "epoch_idx" in index and batches_of_epoch(trainer) < trainer.num_training_batches
    return not is_cut and type(average).should_update(average, **index)


def _settle_buckets(trainer: Trainer, pl_module: LightningModule) -> None:
    """Let DistributedDataParallel build the gradient buckets that it has after the first step.

    A ring all-reduce of more than two processes sums the elements of a bucket in an order that depends on their place,
    so the first step would differ by rounding from an uninterrupted run. Blank images pass forward and backward once;
    buffers and gradients are restored. Virtual replicas have buckets of their own.
    """
    model: Any = trainer.strategy.model
    is_ddp = isinstance(model, DistributedDataParallel) and model.process_group.size() > 2
    if not is_ddp or getattr(pl_module, "virtual_replicas", None) is not None:
        return
    buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
    loader: Any = trainer.train_dataloader
    sampler: TrainSampler = loader.sampler
    # The number of a batch is taken because a compiled network would be compiled again for others.
    num_images = sampler.batch_size // (sampler.layout.data_parallel_size * sampler.accumulation)
    shape: tuple[int, ...] = pl_module.image_shape  # type: ignore[assignment]
    blank = torch.zeros(num_images, *shape, device=pl_module.device)
    with trainer.precision_plugin.train_step_context():
        logits = model(trainer.precision_plugin.convert_input(blank))
    logits.sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for name, buffer in pl_module.named_buffers():
            buffer.copy_(buffers[name])


def _num_rows(trainer: Trainer) -> int:
    """Lines of `metrics.csv` below its header; 0 on processes that do not write it."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and trainer.is_global_zero:
            path = Path(logger.log_dir, "metrics.csv")
            return path.read_bytes().count(b"\n") - 1 if path.exists() else 0
    return 0


def steps_of(trainer: Trainer, batches: float) -> int:
    """Number of optimizer steps of the first `batches` of an epoch, whose last step may have fewer than the others."""
    steps, rest = divmod(batches, trainer.accumulate_grad_batches)
    return int(steps) + (rest > 0 and batches == trainer.num_training_batches)


def _completed(count: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)


def _metrics(module: torch.nn.Module) -> Iterator[tuple[str, Metric]]:
    """The metrics of the training. An evaluation always begins anew, so its counts are not needed.

    A user's own metrics whose states are no sums, such as a maximum or a list of all that they have seen, are left out.
    """
    return (
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, Metric) and not name.startswith(("val_", "test_"))
        if all(reduction is dim_zero_sum for reduction in child._reductions.values())
    )


def check_counts(checkpoint: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Raise a `CheckpointError` if the counts of `module`'s metrics in a checkpoint cannot be theirs."""
    states = {name: metric.metric_state for name, metric in _metrics(module)}
    check_content(checkpoint.get(METRICS, {}), states, METRICS, partly=True)


def _collect(trainer: Trainer, pl_module: LightningModule) -> dict[str, dict[str, Tensor]]:
    """Every metric's counts, summed over the ranks: exact sums, so nobody need know what each rank counted."""
    return {
        name: {
            key: trainer.strategy.reduce(state.clone(), reduce_op="sum").cpu()  # type: ignore[union-attr]
            for key, state in metric.metric_state.items()
        }
        for name, metric in _metrics(pl_module)
    }


def _restore(pl_module: LightningModule, collected: dict[str, dict[str, Tensor]], *, data_parallel_rank: int) -> None:
    for name, metric in _metrics(pl_module):
        if name in collected:
            metric._update_count = 1  # 0 would mean that nothing was counted, of which torchmetrics warns
            counts: dict[str, Any] = metric.metric_state
            for key, state in counts.items():
                found = collected[name][key].to(state.device)
                setattr(metric, key, found if data_parallel_rank == 0 else torch.zeros_like(state))
