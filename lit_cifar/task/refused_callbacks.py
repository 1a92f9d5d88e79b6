"""Callbacks of Lightning's that cannot work here, and settings by which one would decide on the wrong number."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer, WeightAveraging

from lit_cifar.checkpoint.callbacks import BestCheckpoint
from lit_cifar.errors import ConfigError, nearest
from lit_cifar.mode import Mode, mode_of
from lit_cifar.mode.refusals import refuse
from lit_cifar.task.metrics import STEP_METRICS

_OURS = ("train/loss", "train/acc", "train/images_per_s", "val/loss", "val/acc")  # how names of our metrics begin
# Each callback, why it cannot work, and what to do instead.
REFUSED: dict[type[Callback], tuple[str, str]] = {
    callbacks.BaseFinetuning: (
        "frees parameters while it trains, of which ddp and a run that is resumed within an epoch are not told",
        "pass --model.fine_tuning.freeze=PATTERN, and resume with another PATTERN",
    ),
    callbacks.BatchSizeFinder: ("changes the batch size when the run is planned", "pass --data.batch_size=N"),
    callbacks.GradientAccumulationScheduler: ("cuts batches anew", "pass --trainer.accumulate_grad_batches=N"),
    callbacks.LearningRateFinder: ("sets a rate that the module does not have", "pass --model.optimizer.lr=VALUE"),
    callbacks.ModelPruning: ("has masks that a checkpoint does not hold", "prune best.ckpt by torch.nn.utils.prune"),
    callbacks.SpikeDetection: (
        "keeps what it cannot read back, so that the run could not be resumed",
        "pass --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val/loss "
        "--trainer.callbacks.divergence_threshold=VALUE",
    ),
    callbacks.StochasticWeightAveraging: (
        "adds an epoch without steps, for BatchNorm, and forgets its rate in a run that is resumed within an epoch",
        "average with --trainer.callbacks+=lightning.pytorch.callbacks.EMAWeightAveraging",
    ),
    callbacks.ThroughputMonitor: ("counts a validation as steps", "leave it out: train/images_per_s is logged"),
    Timer: ("has a setting that config.yaml cannot hold", "pass --trainer.max_time=DAYS:HOURS:MINUTES:SECONDS"),
}


def check_callbacks(trainer: Any, *, timed: bool) -> None:
    """Refuse the callbacks of `REFUSED`; a run that is `timed` has a Timer of Lightning's."""
    for kind, (reason, remedy) in REFUSED.items():
        found = any(isinstance(callback, kind) for callback in trainer.callbacks)
        if found and not (timed and kind is Timer):
            raise ConfigError(f"--trainer.callbacks: {kind.__name__} {reason}", remedy=remedy)
    if sum(isinstance(callback, WeightAveraging) for callback in trainer.callbacks) > 1:
        problem = "--trainer.callbacks: several callbacks average weights, and a checkpoint holds one average"
        raise ConfigError(problem, remedy="leave out all but one")


def check_monitors(trainer: Any, scores: Iterable[str], *, validates: bool) -> None:
    """Refuse decisions on what nothing logs; `scores` are the names in an evaluation, if one `validates` at all."""
    for callback in trainer.callbacks:
        is_ranked = isinstance(callback, ModelCheckpoint) and callback.monitor not in (None, "epoch", "step")
        if not is_ranked and not isinstance(callback, EarlyStopping):  # a ModelCheckpoint itself knows epoch and step
            continue
        _check_monitor(callback, trainer, validates=validates)
        monitor, stops = str(callback.monitor), isinstance(callback, EarlyStopping) and callback.strict
        flag = "--best_checkpoint" if isinstance(callback, BestCheckpoint) else "--trainer.callbacks"
        if stops and monitor.startswith("val/") and not validates:
            problem = f"{flag}: EarlyStopping follows {monitor}, and no images are validated on"
            raise ConfigError(problem, remedy=f"leave out --data.val_size=0, or pass {flag}.monitor=train/loss")
        check_followed(flag, monitor, callback.mode, trainer, scores)


def check_followed(flag: str, metric: str, mode: str, trainer: Any, scores: Iterable[str]) -> None:
    """Refuse a metric that nothing logs, or of part of a batch or some steps, and a mode that keeps the worst."""
    known = ["val/loss", *scores, "train/loss", "train/acc", *STEP_METRICS, "train/images_per_s"]
    is_own = [type(each).__module__.partition(".")[0] not in ("lightning", "lit_cifar") for each in trainer.callbacks]
    if metric not in known and not any(is_own) and not metric.startswith("lr-"):
        remedy = f"did you mean {flag}.monitor={nearest(metric, known[:-3]) or known[0]}? all: {', '.join(known)}"
        raise ConfigError(f"{flag}.monitor={metric}: nothing logs that", remedy=remedy)
    is_part = mode_of(trainer.strategy).layout.data_parallel_size > 1
    if metric in STEP_METRICS and (is_part or trainer.log_every_n_steps != 1):
        problem = f"{flag}.monitor={metric} is of each process's own part of the batch, and of logged steps alone"
        remedy = f"pass {flag}.monitor={metric.removesuffix('_step')}, the mean of an epoch"
        raise ConfigError(problem, remedy=remedy + ("" if is_part else ", or --trainer.log_every_n_steps=1"))
    if metric.startswith(_OURS) and mode == ("max" if "loss" in metric else "min"):
        problem = f"{flag}.monitor={metric} with mode={mode} would take the worst for the best"
        raise ConfigError(problem, remedy=f"pass {flag}.mode={'max' if mode == 'min' else 'min'}")


def _check_monitor(callback: EarlyStopping | ModelCheckpoint, trainer: Any, *, validates: bool) -> None:
    """Refuse decisions on what was logged before, perhaps by another run."""
    name, monitor, own = f"--trainer.callbacks: {type(callback).__name__}", callback.monitor, vars(callback)
    between = isinstance(callback, ModelCheckpoint) and callback.every_n_epochs == 0  # saves by steps or by time
    if between and monitor not in STEP_METRICS:
        problem = f"{name} between validations is ranked by {monitor} of earlier steps, unknown to a resumed run"
        raise ConfigError(problem, remedy="leave out the monitor, or every_n_train_steps and train_time_interval")
    does = "check" if isinstance(callback, EarlyStopping) else "save"
    if (at_end := own[f"_{does}_on_train_epoch_end"]) is None:
        is_whole = trainer.val_check_interval == 1.0 or (does == "save" and not validates)
        at_end = is_whole and trainer.check_val_every_n_epoch == 1
    if monitor in ("train/loss", "train/acc") and not between and not at_end:
        problem = f"{name} follows {monitor} at validations, when it is of the epoch before, or not known yet"
        raise ConfigError(problem, remedy=f"pass --trainer.callbacks.{does}_on_train_epoch_end=true")


def refuse_averages(trainer: Trainer, mode: Mode) -> None:
    """Raise the `ConfigError` of the table if a callback averages weights, and `mode` refuses that."""
    if any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        refuse("--trainer.callbacks+=EMAWeightAveraging", mode)
