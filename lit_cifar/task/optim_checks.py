"""Optimizers and schedules with which a run would fail at some step, tried before its processes are started."""

import math
import warnings
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.errors import ConfigError
from lit_cifar.mode import mode_of
from lit_cifar.task.metrics import STEP_METRICS
from lit_cifar.task.module import LitResNet
from lit_cifar.task.optim import check_total_steps, followed_metric


def try_optimizer(module: LitResNet) -> tuple[Optimizer, Any]:
    """Make the user's optimizer and schedule, and let the schedule take a step; the fit makes both anew."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the schedule's step comes before the optimizer's
        optimizer = module.optimization.new_optimizer(module.network)
        scheduler: Any = module.optimization.new_scheduler(optimizer)
        try:
            scheduler.step(*([0.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        except ArithmeticError as error:
            problem = f"--model.lr_scheduler={type(scheduler).__name__} cannot take a step: {error}"
            raise ConfigError(problem, remedy="correct its arguments: --model.lr_scheduler.NAME=VALUE") from error
    return optimizer, scheduler


def check_schedule(scheduler: Any, trainer: Trainer, data: CIFAR10DataModule, *, num_batches: int) -> None:
    """Refuse a schedule that does not fit a run with `num_batches` batches in an epoch."""
    check_total_steps(scheduler, _total_steps(trainer, num_batches))
    if isinstance(scheduler, ReduceLROnPlateau):
        _check_followed(followed_metric(scheduler), trainer, data, num_batches=num_batches)


def _total_steps(trainer: Trainer, num_batches: int) -> float:
    """The `estimated_stepping_batches` of epochs of so many: a Trainer says so once all processes have met."""
    most = trainer.max_steps if trainer.max_steps >= 0 else math.inf
    epochs = math.inf if trainer.max_epochs == -1 else max(trainer.max_epochs or 1, 1)
    return min(most, -(-num_batches // trainer.accumulate_grad_batches) * epochs)


def _check_followed(metric: str, trainer: Any, data: CIFAR10DataModule, *, num_batches: int) -> None:
    """Refuse a schedule that follows a validation which does not come in each epoch, or one rank's own batches."""
    if metric in STEP_METRICS and mode_of(trainer.strategy).layout.data_parallel_size > 1:
        problem = f"--model.lr_scheduler.monitor={metric} is of each process's own part of a batch: rates would differ"
        remedy = f"pass --model.lr_scheduler.monitor={metric.removesuffix('_step')}, the mean of an epoch"
        raise ConfigError(problem, remedy=remedy)
    every, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    is_seldom = (every or 1) > 1 or (isinstance(interval, int) and interval > num_batches)
    if metric.startswith("val/") and (is_seldom or not data.val_size or not trainer.limit_val_batches):
        problem = f"--model.lr_scheduler=ReduceLROnPlateau follows {metric} after each epoch, and not each is validated"
        own = "--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau --model.lr_scheduler.monitor=train/loss"
        raise ConfigError(problem, remedy=f"validate after each epoch, or follow the training:\n{own}")
