"""Mistakes in a user's arguments that one process finds before others are started; a Trainer finds them in each."""

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lit_cifar.batch_split import BatchSplit
from lit_cifar.checkpoint.format import naming
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.errors import ConfigError
from lit_cifar.models.blocks import check_network
from lit_cifar.module import LitResNet
from lit_cifar.sample_audit.digest import Receipt, order_settings
from lit_cifar.strategies.virtual_replicas import VirtualReplicas
from lit_cifar.usage_errors import refusing


def check_arguments(trainer: Namespace, *, trains: bool) -> None:
    """Refuse arguments of the Trainer by which it would not train, log or save, or would write to another folder."""
    if trainer.default_root_dir is not None:
        folder = trainer.default_root_dir
        raise ConfigError(
            f"--trainer.default_root_dir={folder} has no effect: everything goes to the run folder",
            remedy=f"pass --run_dir={folder}",
        )
    for name in ("limit_train_batches", "max_epochs", "max_steps"):
        if trains and trainer[name] == 0:
            raise ConfigError(f"--trainer.{name}=0 would train nothing", remedy=f"leave it out, or pass another {name}")
    for name, refused in (("logger", (False, [])), ("enable_checkpointing", (False,)), ("barebones", (True,))):
        if trainer[name] in refused:
            raise ConfigError(
                f"--trainer.{name}={str(trainer[name]).lower()}: every run writes logs and checkpoints to its folder",
                remedy="leave it out; --trainer.fast_dev_run=N runs a few steps and writes nothing",
            )


def check_run(
    trainer: Trainer,
    module: LitResNet,
    data: CIFAR10DataModule,
    *,
    asked: Namespace,
    subcommand: str,
    receipt: Receipt | None,
) -> None:
    """Refuse a run that cannot work, and leave `data` set up.

    `asked` are the arguments that all three were made from, `receipt` is that of the checkpoint that a fit is resumed
    from. The trainer's processes are not started.
    """
    if trainer.world_size == 1 and asked.trainer.sync_batchnorm:
        rank_zero_warn("--trainer.sync_batchnorm=true has no effect with one process, which sees the whole batch")
    _check_kernels(trainer, asked.trainer, compiles=module.compiles)
    if module.cuda_graphs:
        _check_cuda_graphs(trainer)
    batch_split = BatchSplit.of(trainer.strategy)
    if asked.model.ghost_batchnorm is not None and batch_split != BatchSplit():
        raise ConfigError(
            f"--model.ghost_batchnorm computes on one device what a mode does, and this run has a mode: {batch_split}",
            remedy="leave it out, or leave out --trainer.strategy and pass --trainer.devices=1",
        )
    _check_sizes(module, data)
    if subcommand == "fit":
        with refusing():  # arguments such as a negative learning rate; the fit makes both anew
            optimizer = module.make_optimizer(module.network.parameters())
            module.make_lr_scheduler(optimizer)
        check_clipping(trainer, optimizer)
        _check_matrices(trainer, optimizer)
    trainer.strategy.connect(module)  # a strategy that splits the network does so here
    data.trainer = trainer
    data.prepare_data()
    data.setup(subcommand)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning's own omission
        if isinstance(callback, VirtualReplicas):
            callback.check(trainer, data)
    if subcommand == "fit":
        _check_samples(data, receipt, checkpoint=asked.ckpt_path)


def _check_sizes(module: LitResNet, data: CIFAR10DataModule) -> None:
    known = {"num_classes": len(data.classes), "image_size": data.image_size}
    for name, value in known.items():
        if (asked := getattr(module.header, name)) != value:
            raise ConfigError(
                f"--model.{name}={asked}, but {data.name} has {value}",
                remedy=f"pass --model.{name}={value}, or leave it out",
            )
    if module.header.network is not None:
        check_network(module.network, module.image_shape, num_classes=known["num_classes"])


def _check_samples(data: CIFAR10DataModule, receipt: Receipt | None, *, checkpoint: str) -> None:
    sampler = data.train_sampler()
    sampler.check()
    if receipt is not None:
        sampler.set_epoch(receipt.epoch)
        with naming(checkpoint):
            receipt.check(sampler, order_settings(sampler, dataset=data.dataset, val_size=data.val_size))


def _check_kernels(trainer: Trainer, asked: Namespace, *, compiles: bool) -> None:
    """Refuse a precision that Lightning has replaced by another one, and a network that cannot be compiled."""
    if str(asked.precision).startswith("16") and trainer.precision == "bf16-mixed":
        raise ConfigError(
            f"--trainer.precision={asked.precision} needs a GPU: it scales the loss for float16. On the CPU Lightning "
            "would compute in bfloat16",
            remedy="pass --trainer.precision=bf16-mixed",
        )
    if compiles and asked.sync_batchnorm and trainer.world_size > 1:
        raise ConfigError(
            "--model.compile=true with --trainer.sync_batchnorm=true: torch.compile cannot trace the communication "
            "in every BatchNorm layer",
            remedy="leave out one of the two",
        )


def _check_cuda_graphs(trainer: Trainer) -> None:
    """Refuse CUDA graphs where there is no GPU, and where gradients are kept while the next batch passes."""
    flag = "--model.compile=cuda_graphs"
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise ConfigError(
            f"{flag} is for one GPU, without --trainer.strategy: messages between kernels cannot be part of a graph",
            remedy="pass --model.compile=true",
        )
    batches = trainer.accumulate_grad_batches
    if batches > 1 or _has_virtual_replicas(trainer):
        other = f"--trainer.accumulate_grad_batches={batches}" if batches > 1 else "--virtual_replicas"
        raise ConfigError(
            f"{flag} with {other}: gradients are added up, and a graph overwrites those of the batch before",
            remedy="leave out one of the two",
        )
    if trainer.strategy.root_device.type != "cuda":
        raise ConfigError(f"{flag} needs a GPU", remedy="pass --model.compile=true, or leave it out")


def _check_matrices(trainer: Trainer, optimizer: Optimizer) -> None:
    """Refuse virtual replicas with an optimizer that multiplies several matrices at once.

    How many a process has depends on the mode, and with their number a library may choose another kernel.
    """
    if getattr(optimizer, "steps_matrices", False) and _has_virtual_replicas(trainer):
        raise ConfigError(
            f"--virtual_replicas with --model.optimizer={type(optimizer).__name__}, whose bits depend on how many "
            "matrices a process has",
            remedy="leave out one of the two",
        )


def _has_virtual_replicas(trainer: Trainer) -> bool:
    return any(isinstance(callback, VirtualReplicas) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def check_clipping(trainer: Trainer, optimizer: Optimizer) -> None:
    """Refuse a gradient scaler with clipping and a fused optimizer; Lightning would find it in the first step.

    A fused optimizer unscales the gradients in its step, after they have been clipped.
    """
    scales = getattr(trainer.precision_plugin, "scaler", None) is not None
    if scales and trainer.gradient_clip_val and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ConfigError(
            f"--trainer.gradient_clip_val={trainer.gradient_clip_val} with --trainer.precision=16-mixed and "
            f"--model.optimizer.fused=true: a fused {type(optimizer).__name__} unscales the gradients only after they "
            "have been clipped",
            remedy="pass --model.optimizer.fused=false or --trainer.precision=bf16-mixed",
        )
