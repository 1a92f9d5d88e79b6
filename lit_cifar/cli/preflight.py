"""Checks of a user's arguments in one process, before others are started; a Trainer would fail in each."""

import math
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_cifar.checkpoint.format import naming
from lit_cifar.cli.checkpoint_selection import StartingCheckpoint
from lit_cifar.cli.usage_errors import as_config_error
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.dataset import Dataset
from lit_cifar.data.sample_order import OrderSettings, check_held_out, check_rest_of_epoch, order_settings
from lit_cifar.errors import CheckpointError, ConfigError
from lit_cifar.mode import Layout, mode_of
from lit_cifar.mode.refusals import refuse, refuse_averages
from lit_cifar.models.blocks import check_network, unreached_parameters
from lit_cifar.task.module import LitResNet
from lit_cifar.task.optim import check_ratio, check_total_steps, followed_metric

_MANY = 2**16  # upper bound for numbers of things that a list holds
# The least and the largest value of numbers that nobody else checks before the first step.
BOUNDS: dict[str, tuple[float, float]] = {
    "seed_everything": (0, 2**32 - 1),
    "trainer.devices": (-1, _MANY),
    "trainer.min_epochs": (0, math.inf),
    "trainer.min_steps": (0, math.inf),
    "trainer.check_val_every_n_epoch": (1, math.inf),
    "trainer.log_every_n_steps": (0, math.inf),
    "trainer.accumulate_grad_batches": (1, math.inf),
    "trainer.gradient_clip_val": (0, math.inf),
    "model.label_smoothing": (0, 1),
    "model.base_batch_size": (1, math.inf),
    "model.head_lr": (0, math.inf),
    "model.unfreeze_at": (1, math.inf),
    "data.eval_batch_size": (1, math.inf),
    "data.seed": (0, math.inf),
    "data.val_size": (0, math.inf),
    "data.augment.padding": (0, math.inf),
    "data.augment.cutout": (0, math.inf),
    "data.num_workers": (0, _MANY),
    "data.pictures.memory_gb": (0, math.inf),
    "figures.num_wrong": (0, _MANY),
    "figures.every_n_epochs": (0, math.inf),
    "last_checkpoint.every_n_epochs": (0, math.inf),
    "last_checkpoint.every_n_steps": (1, math.inf),
    "last_checkpoint.every_n_seconds": (0, math.inf),
}

# Lightning's callbacks that cannot work here, why, and what to do instead.
REFUSED: dict[type[Callback], tuple[str, str]] = {
    BackboneFinetuning: (
        "needs a module with a `backbone`, and the network is not divided into one and a head",
        "pass --model.freeze=PATTERN --model.unfreeze_at=EPOCH, or derive a callback of your own from "
        "lightning.pytorch.callbacks.BaseFinetuning",
    ),
    BatchSizeFinder: (
        "changes the batch size when the run is planned and written down",
        "pass --data.batch_size=N; --trainer.fast_dev_run=3 tries one",
    ),
    GradientAccumulationScheduler: (
        "changes between epochs into how many parts a batch is cut, which the sampler does once",
        "pass --trainer.accumulate_grad_batches=N",
    ),
    LearningRateFinder: (
        "sets a learning rate that the module does not have, as the optimizer has its own",
        "pass --model.optimizer.lr=VALUE",
    ),
    ModelPruning: (
        "has masks that a checkpoint does not hold, so that a resumed run would train what was pruned",
        "leave it out, and prune the network of best.ckpt by torch.nn.utils.prune",
    ),
    SpikeDetection: (
        "keeps what it cannot read back, so that the run could not be resumed",
        "pass --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val/loss "
        "--trainer.callbacks.divergence_threshold=VALUE",
    ),
    StochasticWeightAveraging: (
        "adds an epoch without steps at the end, for BatchNorm, and forgets its learning rate in a run that is resumed "
        "within an epoch",
        "average with --trainer.callbacks+=lightning.pytorch.callbacks.EMAWeightAveraging",
    ),
    ThroughputMonitor: (
        "logs the batches of a validation as if they were steps of the training",
        "leave it out; --trainer.log_every_n_steps=N logs train/images_per_s",
    ),
    Timer: ("has a setting that config.yaml cannot hold", "pass --trainer.max_time=DAYS:HOURS:MINUTES:SECONDS"),
}

STEP_METRICS = ("train/loss_step", "train/acc_step")  # see `LitResNet.step_metrics`


def check_bounds(arguments: Namespace) -> None:
    """Refuse numbers outside of `BOUNDS`."""
    for name, (least, most) in BOUNDS.items():
        value = arguments.get(name)
        if isinstance(value, str) and value.isdecimal():  # the number of devices is read as a string
            value = int(value)
        if isinstance(value, int | float) and not least <= value <= most:
            rule = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise ConfigError(
                f"--{name}={value} must be {rule}",
                remedy=f"pass --{name}={least if least >= 0 else 1}, or leave it out",
            )


def check_arguments(trainer: Namespace, *, trains: bool) -> None:
    """Refuse arguments of the Trainer by which it would not train, log or save, or would write to another folder."""
    if trainer.default_root_dir is not None:
        folder = trainer.default_root_dir
        raise ConfigError(
            f"--trainer.default_root_dir={folder} has no effect: everything goes to the run folder",
            remedy="pass " + shlex.quote(f"--run_dir={folder}"),
        )
    for name in ("limit_train_batches", "max_epochs", "max_steps"):
        if trains and trainer[name] == 0:
            raise ConfigError(f"--trainer.{name}=0 would train nothing", remedy=f"leave it out, or pass another {name}")
    for least, most in (("min_epochs", "max_epochs"), ("min_steps", "max_steps")):
        if trains and trainer[least] and trainer[most] not in (None, -1) and trainer[least] > trainer[most]:
            raise ConfigError(
                f"--trainer.{least}={trainer[least]} is more than --trainer.{most}={trainer[most]}, which ends the run",
                remedy=f"pass --trainer.{most}={trainer[least]}, or leave out {least}",
            )
    if trainer.val_check_interval == 0:
        raise ConfigError(
            "--trainer.val_check_interval=0 is no interval",
            remedy="pass --trainer.val_check_interval=1.0 to validate after each epoch",
        )
    if trains and not isinstance(trainer.val_check_interval, int | float | None):
        raise ConfigError(
            f"--trainer.val_check_interval={trainer.val_check_interval}: by the clock, a validation comes elsewhere in "
            "each process, and when a run is repeated",
            remedy="pass a number of batches, or a share of them: --trainer.val_check_interval=0.5",
        )
    for name, refused in (("logger", (False, [])), ("enable_checkpointing", (False,)), ("barebones", (True,))):
        if trainer[name] in refused:
            raise ConfigError(
                f"--trainer.{name}={str(trainer[name]).lower()}: every run writes logs and checkpoints to its folder",
                remedy="leave it out; --trainer.fast_dev_run=N runs a few steps and writes nothing",
            )


def check_saved_config(parser: ArgumentParser, arguments: Namespace) -> None:
    """Refuse a setting that `config.yaml` cannot hold: whoever reads the file would have another, or an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            parser.dump(arguments)
        except (TypeError, ValueError) as error:
            warnings.warn(str(error), stacklevel=1)
    said = "".join(str(found.message) for found in caught if issubclass(found.category, UserWarning))
    if said:
        text = "".join(said.split())  # jsonargparse's line breaks are left out
        named = [f"--{name}={value}" for name, value in _settings(arguments) if "".join(str(value).split()) in text]
        raise ConfigError(
            f"{named[0] if named else said} cannot be written to config.yaml, by which the run is repeated",
            remedy="let it be a number, a word, or the path of a class or a function, also where it is a default",
        )


def _settings(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each object in `value` that is neither a number nor a word, with its name on the command line."""
    if isinstance(value, Namespace | dict):
        for key, item in (vars(value) if isinstance(value, Namespace) else value).items():
            within = key in ("init_args", "dict_kwargs")
            yield from _settings(item, name if within else f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _settings(item, name)
    elif not isinstance(value, bool | int | float | str | None):
        yield name, value


def check_unasked_resume(trainer: Any, *, trains: bool) -> None:
    """Refuse a run that Lightning would begin with a file that another has left."""
    left = sorted(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt")) if SLURMEnvironment.detect() else []
    if left:
        raise ConfigError(
            f"{left[-1]} is there, and in a job of SLURM Lightning would load it unasked",
            remedy="move it, and pass it as --ckpt_path to go on from it",
        )
    for callback in trainer.callbacks:
        if trains and isinstance(callback, OnExceptionCheckpoint) and Path(callback.ckpt_path).exists():
            raise ConfigError(
                f"{callback.ckpt_path} is there, and with OnExceptionCheckpoint Lightning would resume from it unasked",
                remedy="move it, and pass it as --ckpt_path to go on from it; or pass another "
                "--trainer.callbacks.dirpath",
            )


def check_sizes(model: Namespace, data: Dataset) -> None:
    """Refuse sizes of a network that are not those of the data."""
    for name, value in {"num_classes": len(data.classes), "image_size": data.image_size}.items():
        if model[name] not in (None, value):
            raise ConfigError(
                f"--model.{name}={model[name]}, but {data.title} has {value}",
                remedy=f"pass --model.{name}={value}, or leave it out",
            )


def check_run(
    trainer: Trainer,
    module: LitResNet,
    data: CIFAR10DataModule,
    *,
    asked: Namespace,
    subcommand: str,
    start: StartingCheckpoint,
    replicas: Any,
) -> None:
    """Refuse a run that cannot work, and leave `data` set up.

    `asked` are the arguments that trainer, module and data were made from, `replicas` is the callback of
    `--virtual_replicas`. The trainer's processes are not started.
    """
    if trainer.world_size == 1 and asked.trainer.sync_batchnorm:
        rank_zero_warn("--trainer.sync_batchnorm=true has no effect with one process, which sees the whole batch")
    _check_callbacks(trainer, timed=asked.trainer.max_time is not None)
    _check_precision(trainer, asked.trainer, compiles=module.compiles)
    if module.cuda_graphs:
        _check_cuda_graphs(trainer, has_parts=replicas is not None)
    layout = mode_of(trainer.strategy).layout
    if asked.model.ghost_batchnorm is not None:
        _check_ghost_batches(asked.model.ghost_batchnorm, layout, data.batch_size)
    if module.header.network is not None:
        check_network(module.network, module.image_shape, num_classes=len(data.classes))
    if subcommand == "fit":
        optimizer, scheduler = _try_optimizer(module)
        refuse_averages(trainer, mode_of(trainer.strategy))
        if replicas is not None:
            _check_matrices(optimizer)
        is_ddp = isinstance(trainer.strategy, DDPStrategy)
        if module.header.network is not None and (is_ddp or replicas is not None):
            _check_reached(trainer.strategy, module, has_parts=replicas is not None)
        if module.header.network is not None and is_ddp:
            mode = mode_of(trainer.strategy)
            if mode.is_spawned:  # torch does not send hooks to processes
                from lit_cifar.strategies.base import check_gradient_hooks

                check_gradient_hooks(module, strategy=f"ddp_{mode.start_method}")
    trainer.strategy.connect(module)  # a strategy that splits the network does so here
    data.trainer = trainer
    data.prepare_data()
    data.setup(subcommand)
    if replicas is not None:
        replicas.check(trainer, data)
    _check_evaluation(trainer, data, subcommand)
    if subcommand == "fit":
        data.train_sampler().check()
        data.class_factors()
        num_batches = _check_intervals(trainer, data)
        check_total_steps(scheduler, _total_steps(trainer, num_batches))
        if isinstance(scheduler, ReduceLROnPlateau):
            _check_followed(followed_metric(scheduler), trainer, data, num_batches=num_batches)
    if start.order is not None:
        with naming(asked.ckpt_path):
            _compare_images(start.order, order_settings(data), start)


def _compare_images(then: OrderSettings, now: OrderSettings, start: StartingCheckpoint) -> None:
    """Refuse to go on with other images; of weights alone, with which a new training starts, this is told."""
    if start.within_epoch:
        check_rest_of_epoch(then, now)
    try:
        check_held_out(then, now)
    except CheckpointError as error:
        if not start.has_weights_alone:
            raise
        if then.get("dataset") == now["dataset"]:  # else none of these was seen
            rank_zero_warn(f"{error.problem}. They are not new to the weights, so that val/acc says too much")


def _try_optimizer(module: LitResNet) -> tuple[Optimizer, Any]:
    """Make the user's optimizer and schedule, and let the schedule take a step; the fit makes both anew."""
    with as_config_error(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the schedule's step comes before the optimizer's
        optimizer = module.new_optimizer()
        rates = [group["lr"] for group in optimizer.param_groups]
        scheduler: Any = module.new_scheduler(optimizer)
        try:
            scheduler.step(*([0.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        except ArithmeticError as error:
            raise ConfigError(
                f"--model.lr_scheduler={type(scheduler).__name__} cannot take a step: {error}",
                remedy="correct its arguments: --model.lr_scheduler.NAME=VALUE",
            ) from error
        if module.head_lr is not None and optimizer.param_groups[0]["lr"]:
            check_ratio(scheduler, optimizer, rates)
    return optimizer, scheduler


def _check_ghost_batches(asked: Any, layout: Layout, batch_size: int) -> None:
    if layout != Layout():
        raise ConfigError(
            f"--model.ghost_batchnorm computes on one device what a mode does, and this run has a mode: {layout}",
            remedy="leave it out, or leave out --trainer.strategy and pass --trainer.devices=1",
        )
    sizes = {name: size for name, size in vars(asked).items() if name != "synchronised"}
    if (num_parts := math.prod(sizes.values())) > batch_size:
        name = max(sizes, key=lambda name: sizes[name])
        most = max(batch_size * sizes[name] // num_parts, 1)
        raise ConfigError(
            f"--model.ghost_batchnorm cuts a batch of {batch_size} images into {num_parts} parts",
            remedy=f"pass --model.ghost_batchnorm.{name}={most} or less",
        )


def _check_reached(strategy: Any, module: LitResNet, *, has_parts: bool) -> None:
    """Refuse parameters for whose gradients DistributedDataParallel, or other virtual replicas, would wait in vain."""
    from lit_cifar.strategies.mesh import MeshStrategy

    is_ddp = isinstance(strategy, DDPStrategy)
    finds = not is_ddp or strategy._ddp_kwargs.get("find_unused_parameters") or strategy._ddp_kwargs.get("static_graph")
    if finds and not has_parts:
        return
    start = f"_{strategy._start_method}" if is_ddp and strategy._start_method != "popen" else ""
    other, kind = f"pass --trainer.strategy=ddp{start}_find_unused_parameters_true", type(module.network).__name__
    never, sometimes = unreached_parameters(module.network, module.image_shape)
    if sometimes and (has_parts or mode_of(strategy).layout.data_parallel_size > 1):
        raise ConfigError(
            f"{kind} leaves out {sometimes[0]} in some steps, as it draws: replicas would mix each other's gradients, "
            "or wait for them",
            remedy=("" if has_parts else f"{other}, or ") + "multiply by 0 in place of leaving it out",
        )
    if never and not finds and not isinstance(strategy, MeshStrategy):
        raise ConfigError(
            f"the loss of {kind} does not depend on {len(never)} of its parameters, the first is {never[0]}: ddp would "
            "wait for their gradients",
            remedy=f"{other}, or remove them",
        )


def _total_steps(trainer: Trainer, num_batches: int) -> float:
    """The `estimated_stepping_batches` of epochs of so many: a Trainer says so once all processes have met."""
    most = trainer.max_steps if trainer.max_steps >= 0 else math.inf
    epochs = math.inf if trainer.max_epochs == -1 else max(trainer.max_epochs or 1, 1)
    return min(most, -(-num_batches // trainer.accumulate_grad_batches) * epochs)


def _check_followed(metric: str, trainer: Any, data: CIFAR10DataModule, *, num_batches: int) -> None:
    """Refuse a schedule that follows a validation which does not come in each epoch, or one rank's own batches."""
    if metric in STEP_METRICS and mode_of(trainer.strategy).layout.data_parallel_size > 1:
        raise ConfigError(
            f"--model.lr_scheduler.monitor={metric} is of each process's own part of a batch: their rates would differ",
            remedy=f"pass --model.lr_scheduler.monitor={metric.removesuffix('_step')}, the mean of an epoch",
        )
    every, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    is_seldom = (every or 1) > 1 or (isinstance(interval, int) and interval > num_batches)
    if metric.startswith("val/") and (is_seldom or not data.val_size or not trainer.limit_val_batches):
        raise ConfigError(
            f"--model.lr_scheduler=ReduceLROnPlateau follows {metric} after each epoch, and not each is validated",
            remedy="validate each (--data.val_size, --trainer.check_val_every_n_epoch=1), or follow the training:\n"
            "--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau --model.lr_scheduler.monitor=train/loss",
        )


def _check_intervals(trainer: Trainer, data: CIFAR10DataModule) -> int:
    """Refuse an epoch of no batch or with a last step of fewer than are accumulated, and a validation that never comes.

    Returns the number of batches of an epoch.

    Lightning would divide the gradients of that step by the full number, and take a smaller step.
    """
    sampler, limit = data.train_sampler(), trainer.limit_train_batches
    num_batches, accumulation = len(sampler), sampler.accumulation
    counted = min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
    overfits = trainer.overfit_batches  # type: ignore[attr-defined]  # Lightning's own omission
    flag = "--trainer.overfit_batches" if overfits else "--trainer.limit_train_batches"
    _check_share(flag, limit, num_batches)
    if counted % accumulation and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        whole = counted // accumulation * accumulation
        nearest = [f"{flag}={value}" for value in (whole, whole + accumulation) if value]
        raise ConfigError(
            f"{flag}={limit} leaves {counted} of {num_batches} batches, "
            f"and --trainer.accumulate_grad_batches={accumulation} are one step",
            remedy="the nearest that are whole steps: " + " or ".join(nearest),
        )
    every = trainer.val_check_interval
    if data.val_size and trainer.limit_val_batches:
        _check_share("--trainer.val_check_interval", every, counted)
    every = every if isinstance(every, int) else int(counted * every)
    if every % accumulation and trainer.limit_val_batches and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigError(
            f"--trainer.val_check_interval={trainer.val_check_interval} validates and saves after {every} batches, and "
            f"--trainer.accumulate_grad_batches={accumulation} are one step",
            remedy=f"pass --trainer.val_check_interval={-(-every // accumulation) * accumulation}",
        )
    interval, counts_epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch is not None
    if isinstance(interval, int) and interval > counted and counts_epochs and trainer.limit_val_batches:
        raise ConfigError(
            f"--trainer.val_check_interval={interval} batches is longer than an epoch, which has {counted}",
            remedy=f"pass --trainer.val_check_interval={counted}, or --trainer.check_val_every_n_epoch=null too",
        )
    return counted


def _check_evaluation(trainer: Any, data: CIFAR10DataModule, subcommand: str) -> None:
    """Refuse a share of the batches of an evaluation that is less than one."""
    split = subcommand if subcommand in ("test", "predict") else "val"
    if split != "val" or data.val_size:
        overfits = split == "val" and trainer.overfit_batches
        flag = "--trainer.overfit_batches" if overfits else f"--trainer.limit_{split}_batches"
        limit = getattr(trainer, f"limit_{split}_batches")
        _check_share(flag, limit or 1.0, len(data.evaluation_sampler(split)), kind=f"{split} ")


def _check_share(flag: str, limit: float, num_batches: int, *, kind: str = "") -> None:
    """Refuse `limit`, a number of batches or a share of all, if it comes to none."""
    if isinstance(limit, float) and int(num_batches * limit) < 1:
        raise ConfigError(
            f"{flag}={limit} of {num_batches} {kind}batch{'es' * (num_batches > 1)} is less than one",
            remedy=f"pass {flag}=1, which means one batch",
        )


def _check_callbacks(trainer: Any, *, timed: bool) -> None:
    """Refuse the callbacks of `REFUSED`; a run that is `timed` has a Timer of Lightning's."""
    for kind, (reason, remedy) in REFUSED.items():
        found = any(isinstance(callback, kind) for callback in trainer.callbacks)
        if found and not (timed and kind is Timer):
            raise ConfigError(f"--trainer.callbacks: {kind.__name__} {reason}", remedy=remedy)
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping | ModelCheckpoint):
            _check_monitor(callback, processes=mode_of(trainer.strategy).layout.data_parallel_size)


def _check_monitor(callback: EarlyStopping | ModelCheckpoint, *, processes: int) -> None:
    """Refuse decisions on what processes log apart, and on what a resumed run has not logged yet."""
    name, monitor = f"--trainer.callbacks: {type(callback).__name__}", callback.monitor
    if monitor in STEP_METRICS and processes > 1:
        raise ConfigError(
            f"{name} with {monitor}, of which each process logs that of its own part of the batch: what is decided "
            "would depend on their number",
            remedy=f"pass --trainer.callbacks.monitor={monitor.removesuffix('_step')}, the mean of an epoch",
        )
    between = isinstance(callback, ModelCheckpoint) and callback.every_n_epochs == 0  # saves by steps or by time
    if monitor is not None and monitor not in STEP_METRICS and between:
        raise ConfigError(
            f"{name} between validations would be ranked by the {monitor} of an earlier one, which a run that is "
            "resumed does not know",
            remedy="leave out the monitor, or every_n_train_steps and train_time_interval",
        )


def _check_precision(trainer: Trainer, asked: Namespace, *, compiles: bool) -> None:
    """Refuse a precision that Lightning has replaced, and a network that cannot be compiled."""
    if str(asked.precision).startswith("16") and trainer.precision == "bf16-mixed":
        raise ConfigError(
            f"--trainer.precision={asked.precision} needs a GPU: it scales the loss for float16. On the CPU Lightning "
            "would compute in bfloat16",
            remedy="pass --trainer.precision=bf16-mixed",
        )
    if trainer.precision.startswith("bf16") and trainer.strategy.root_device.type == "cpu":
        from lit_cifar.models.autotune import cpu_has_bf16

        if not cpu_has_bf16():
            rank_zero_warn(
                f"--trainer.precision={asked.precision} on a CPU without instructions for bfloat16: a step may take 30 "
                "times as long as with --trainer.precision=32-true"
            )
    if compiles and asked.sync_batchnorm and trainer.world_size > 1:
        raise ConfigError(
            "--model.compile=true with --trainer.sync_batchnorm=true: torch.compile cannot trace the communication "
            "in every BatchNorm layer",
            remedy="leave out one of the two",
        )


def _check_cuda_graphs(trainer: Trainer, *, has_parts: bool) -> None:
    """Refuse CUDA graphs where there is no GPU, and where gradients are kept while the next batch passes."""
    flag = "--model.compile=cuda_graphs"
    refuse(flag, mode_of(trainer.strategy))
    batches = trainer.accumulate_grad_batches
    if batches > 1 or has_parts:
        other = f"--trainer.accumulate_grad_batches={batches}" if batches > 1 else "--virtual_replicas"
        raise ConfigError(
            f"{flag} with {other}: gradients are added up, and a graph overwrites those of the batch before",
            remedy="leave out one of the two",
        )
    if trainer.strategy.root_device.type != "cuda":
        raise ConfigError(f"{flag} needs a GPU", remedy="pass --model.compile=true, or leave it out")


def _check_matrices(optimizer: Optimizer) -> None:
    """Refuse virtual replicas with an optimizer that multiplies several matrices at once.

    Their number in a process depends on the mode, and a library may choose kernels by that number.
    """
    if getattr(optimizer, "steps_matrices", False):
        raise ConfigError(
            f"--virtual_replicas with --model.optimizer={type(optimizer).__name__}, whose bits depend on how many "
            "matrices a process has",
            remedy="leave out one of the two",
        )
