"""Limits and intervals of a Trainer that do not fit the batches of an epoch."""

from lightning.pytorch import Trainer

from lit_cifar.data.datamodule import CIFAR10DataModule
from lit_cifar.errors import ConfigError


def check_intervals(trainer: Trainer, data: CIFAR10DataModule) -> int:
    """The number of batches of an epoch; an epoch of none is refused, and a validation that never comes.

    So is a last step of fewer than are accumulated: Lightning would divide its gradients by the full number.
    """
    sampler, limit = data.train_sampler(), trainer.limit_train_batches
    num_batches, accumulation = len(sampler), sampler.accumulation
    counted = min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
    overfits = trainer.overfit_batches  # type: ignore[attr-defined]  # Lightning's own omission
    flag = "--trainer.overfit_batches" if overfits else "--trainer.limit_train_batches"
    _check_share(flag, limit, num_batches)
    one_step = f"and --trainer.accumulate_grad_batches={accumulation} are one step"
    is_short = trainer.fast_dev_run  # type: ignore[attr-defined]
    if counted % accumulation and not is_short:
        whole = counted // accumulation * accumulation
        nearest = [f"{flag}={value}" for value in (whole, whole + accumulation) if value]
        problem = f"{flag}={limit} leaves {counted} of {num_batches} batches, {one_step}"
        raise ConfigError(problem, remedy="the nearest that are whole steps: " + " or ".join(nearest))
    if not trainer.limit_val_batches:
        return counted
    name, interval = "--trainer.val_check_interval", trainer.val_check_interval
    if data.val_size:
        _check_share(name, interval, counted)
    every = interval if isinstance(interval, int) else int(counted * interval)
    if every % accumulation and not is_short:
        remedy = f"pass {name}={-(-every // accumulation) * accumulation}"
        raise ConfigError(f"{name}={interval} validates and saves after {every} batches, {one_step}", remedy=remedy)
    if isinstance(interval, int) and interval > counted and trainer.check_val_every_n_epoch is not None:
        remedy = f"pass {name}={counted}, or --trainer.check_val_every_n_epoch=null too"
        raise ConfigError(f"{name}={interval} is longer than an epoch, which has {counted} batches", remedy=remedy)
    return counted


def _check_share(flag: str, limit: float, num_batches: int) -> None:
    """Refuse `limit`, a number of batches or a share of all, if it comes to none."""
    if isinstance(limit, float) and int(num_batches * limit) < 1:
        problem = f"{flag}={limit} of {num_batches} batch{'es' * (num_batches > 1)} is less than one"
        raise ConfigError(problem, remedy=f"pass {flag}=1, which means one batch")
