"""Limits and intervals of a Trainer that do not fit the batches of an epoch."""

from lightning.pytorch import Trainer

from lit_cifar.data.datamodule import CIFAR10DataModule
from lit_cifar.errors import ConfigError


def check_intervals(trainer: Trainer, data: CIFAR10DataModule) -> int:
    """The number of batches of an epoch; an epoch of none is refused, and a validation that never comes.

    So is a last step of fewer than are accumulated: Lightning would divide its gradients by the full number.
    """
    sampler, limit = data.train_sampler(), trainer.limit_train_batches
    overfits = trainer.overfit_batches  # type: ignore[attr-defined]  # Lightning's own omission
    flag = "--trainer.overfit_batches" if overfits else "--trainer.limit_train_batches"
    # A quick trial run may have any number.
    accumulation = 1 if trainer.fast_dev_run else sampler.accumulation  # type: ignore[attr-defined]
    limit = min(limit, len(sampler)) if isinstance(limit, int) else limit
    counted = _counted(flag, limit, len(sampler), accumulation)
    if not trainer.limit_val_batches:
        return counted
    name, interval = "--trainer.val_check_interval", trainer.val_check_interval
    _counted(name, interval, counted, accumulation)
    if isinstance(interval, int) and interval > counted and trainer.check_val_every_n_epoch is not None:
        remedy = f"pass {name}={counted}, or --trainer.check_val_every_n_epoch=null too"
        raise ConfigError(f"{name}={interval} is longer than an epoch, which has {counted} batches", remedy=remedy)
    return counted


def _counted(flag: str, limit: float, num_batches: int, accumulation: int) -> int:
    """The batches in `limit`, a number or a share of `num_batches`. None are refused, and a part of a step."""
    counted = limit if isinstance(limit, int) else int(num_batches * limit)
    if isinstance(limit, float) and counted < 1:
        problem = f"{flag}={limit} of {num_batches} batch{'es' * (num_batches > 1)} is less than one"
        raise ConfigError(problem, remedy=f"pass {flag}=1, which means one batch")
    if counted % accumulation:
        whole = counted // accumulation * accumulation
        nearest = [f"{flag}={value}" for value in (whole, whole + accumulation) if value]
        problem = f"{flag}={limit} is {counted} of {num_batches} batches"
        one_step = f"--trainer.accumulate_grad_batches={accumulation} are one step"
        raise ConfigError(f"{problem}, and {one_step}", remedy="the nearest whole steps: " + " or ".join(nearest))
    return counted
