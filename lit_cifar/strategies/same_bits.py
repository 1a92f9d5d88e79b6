"""What would change the bits that `--virtual_replicas` promises, refused before any process is started."""

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from lit_cifar.batch_split import BatchSplit
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.errors import ConfigError
from lit_cifar.strategies.custom_forward import CustomForwardStrategy
from lit_cifar.strategies.network import compiles


def check_same_bits(num_parts: int, trainer: L.Trainer, data: CIFAR10DataModule) -> None:
    """Refuse a run that would not end with the same bits on every number of devices.

    Raises:
        ConfigError: A mode, a number of devices, or sizes that do not fit.
    """
    name, strategy = f"--virtual_replicas={num_parts}", trainer.strategy
    if num_parts < 1 or num_parts & (num_parts - 1):
        nearest = 1 << max(0, num_parts.bit_length() - 1)
        raise ConfigError(
            f"{name} is no power of two, and a binary tree adds the parts",
            remedy=f"pass --virtual_replicas={nearest} or {2 * nearest}",
        )
    _check_mode(name, strategy)
    if num_parts % (replicas := BatchSplit.of(strategy).num_replicas):
        raise ConfigError(
            f"{name} cannot be divided among {replicas} replicas",
            remedy=f"change --trainer.devices, so that there are {1 << (min(replicas, num_parts).bit_length() - 1)}",
        )
    if trainer.accumulate_grad_batches > 1:
        accumulated = trainer.accumulate_grad_batches
        raise ConfigError(
            f"{name} with --trainer.accumulate_grad_batches={accumulated} would add gradients in another order",
            remedy="leave out the latter: the parts of a batch pass one after the other already",
        )
    if getattr(strategy, "_layer_sync", None) is not None and BatchSplit.of(strategy).dp_size > 1:
        raise ConfigError(
            f"{name} with --trainer.sync_batchnorm=true would normalise parts of several processes together",
            remedy="leave out the latter: each part is normalised by itself",
        )
    _check_sizes(num_parts, data)


def _check_mode(name: str, strategy: Strategy) -> None:
    if not isinstance(strategy, CustomForwardStrategy | DDPStrategy | SingleDeviceStrategy):
        raise ConfigError(
            f"{name} with {type(strategy).__name__}, which adds gradients in an order of its own",
            remedy="leave it out, or pass --trainer.strategy=ddp",
        )
    if isinstance(strategy, CustomForwardStrategy) and compiles(strategy.lightning_module):
        raise ConfigError(
            f"{name} with --model.compile=true: a part of a network is compiled to other kernels than the whole",
            remedy="leave out the latter, or pass --trainer.strategy=ddp",
        )


def _check_sizes(num_parts: int, data: CIFAR10DataModule) -> None:
    for flag, size in (("batch_size", data.batch_size), ("eval_batch_size", data.eval_batch_size)):
        if size % num_parts:
            raise ConfigError(
                f"--data.{flag}={size} does not divide into {num_parts} virtual replicas",
                remedy=f"pass --data.{flag}={max(1, size // num_parts) * num_parts}",
            )
    rest = len(data.sets["train"]) % data.batch_size if "train" in data.sets else 0
    if rest and not data.drop_last and rest < 2 * num_parts:
        raise ConfigError(
            f"the last batch of an epoch has {rest} images for {num_parts} virtual replicas; each needs 2",
            remedy="pass --data.drop_last=true, or change --data.batch_size or --data.val_size",
        )
