"""The order in which a run is checked, in one process before others are started; a Trainer would fail in each.

Every check stands in its feature. Numbers are bounded where a class takes them.
"""

from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lit_cifar.cli.checkpoint_selection import Start, check_unasked_resume
from lit_cifar.cli.usage_errors import as_config_error
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.dataset import Dataset
from lit_cifar.data.limits import check_intervals
from lit_cifar.errors import ConfigError
from lit_cifar.mode import mode_of
from lit_cifar.mode.refusals import check_cuda_graphs, check_sync_batchnorm
from lit_cifar.models.precision import check_precision
from lit_cifar.task.module import LitResNet
from lit_cifar.task.optimization import check_schedule
from lit_cifar.task.refused_callbacks import check_callbacks, check_monitors, refuse_averages


def check_sizes(model: Namespace, data: Dataset) -> None:
    """Refuse sizes of a network that are not those of the data."""
    for name, value in {"num_classes": len(data.classes), "image_size": data.image_size}.items():
        if model[name] not in (None, value):
            problem = f"--model.{name}={model[name]}, but {data.title} has {value}"
            raise ConfigError(problem, remedy=f"pass --model.{name}={value}, or leave it out")


def check_run(
    trainer: Trainer, module: LitResNet, data: CIFAR10DataModule, *, asked: Namespace, stage: str, start: Start
) -> None:
    """Refuse a run that cannot work, and leave `data` set up.

    `asked` are the arguments that trainer, module and data were made from. The trainer's processes are not started.
    """
    mode, trains, has_parts = mode_of(trainer.strategy), stage == "fit", asked.virtual_replicas is not None
    # What is known of trainer and module.
    if asked.ckpt_path is None:
        check_unasked_resume(trainer)
    check_callbacks(trainer, timed=asked.trainer.max_time is not None)
    check_precision(trainer, asked=asked.trainer.precision)
    if asked.trainer.sync_batchnorm:
        check_sync_batchnorm(trainer, compiles=module.compiles)
    if module.cuda_graphs:
        check_cuda_graphs(trainer, has_parts=has_parts)
    if module.ghost_batchnorm is not None:
        module.ghost_batchnorm.check(mode.layout, data.batch_size)
    # What a network or an optimizer of the user's shows once it is tried.
    if module.header.network is not None:
        from lit_cifar.models.own_network import check_network

        check_network(module.network, module.image_shape, num_classes=len(data.classes))
        if trains and (has_parts or isinstance(trainer.strategy, DDPStrategy)):
            from lit_cifar.strategies.own_networks import check_gradients  # others need no strategies

            check_gradients(trainer.strategy, module, has_parts=has_parts)
    if trains:
        with as_config_error():
            optimizer, scheduler = module.optimization.tried(module.network)
        mode.check_optimizer(optimizer)
        refuse_averages(trainer, mode)
    with as_config_error():
        trainer.strategy.connect(module)  # a strategy that splits the network does so here
    # What depends on the images.
    data.trainer = trainer
    if stage != "predict":
        data.prepare_data()
    data.setup(stage)
    if has_parts:
        from lit_cifar.strategies.virtual_replicas import VirtualReplicas

        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning's own omission
        replicas = next(callback for callback in callbacks if isinstance(callback, VirtualReplicas))
        replicas.check(trainer, data, optimizer if trains else None)
    if trains:
        data.train_sampler().check()
        data.class_factors()
        validates, scores = bool(data.val_size and trainer.limit_val_batches), [*map(str, module.val_metrics.scores)]
        check_monitors(trainer, scores, validates=validates)
        num_batches = check_intervals(trainer, data)
        check_schedule(scheduler, trainer, data, num_batches=num_batches, scores=scores)
    start.compare_images(data, steps=-(-num_batches // trainer.accumulate_grad_batches) if trains else 0)
