"""Mistakes that are made in training on several devices, to be planted one by one: `verify --self-test` must see each.

Each is planted in every process of a run, before the strategy touches the network.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.func import functional_call

from lit_cifar.data.datamodule import CIFAR10DataModule
from lit_cifar.data.samplers import EvaluationSampler, Part, TrainSampler
from lit_cifar.module import LitResNet
from lit_cifar.schedules import WarmupDecay
from lit_cifar.strategies import tensor_parallel
from lit_cifar.strategies.mesh import local_part
from lit_cifar.strategies.pipeline import Pipeline
from lit_cifar.strategies.replicate import VirtualReplicas
from lit_cifar.strategies.staged import StagedRunner

Plant = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Bug:
    """A mistake.

    Attributes:
        name: What `Trace` is told.
        imitates: What someone forgot or misunderstood.
        mode: The mode in which it is planted.
        plant: Makes it, given the trainer and the module.
        args: Further flags of `fit` that it needs to show.
    """

    name: str
    imitates: str
    mode: str
    plant: Plant
    args: tuple[str, ...] = ()


def plant(name: str, trainer: Any, module: Any) -> None:
    """Make the mistake called `name`."""
    BUGS[name].plant(trainer, module)


def _no_all_reduce(trainer: Any, module: Any) -> None:
    configure = DDPStrategy.configure_ddp

    def configure_without_sync(self: Any) -> None:
        configure(self)
        self.model.require_backward_grad_sync = False

    DDPStrategy.configure_ddp = configure_without_sync  # type: ignore[method-assign]


def _summed_gradients(trainer: Any, module: Any) -> None:
    backward = trainer.strategy.backward
    trainer.strategy.backward = lambda loss, *args, **kwargs: backward(loss * trainer.world_size, *args, **kwargs)


def _scaled_loss(trainer: Any, module: Any) -> None:
    step = module.training_step
    module.training_step = lambda *args: step(*args) / trainer.world_size


def _unweighted_ragged_batch(trainer: Any, module: Any) -> None:
    iterate = TrainSampler.__iter__

    def unweighted(self: TrainSampler) -> Iterator[Part]:
        for part in iterate(self):
            yield part._replace(weight=1.0)

    TrainSampler.__iter__ = unweighted  # type: ignore[method-assign]


def _duplicated_shard(trainer: Any, module: Any) -> None:
    make = CIFAR10DataModule.train_sampler

    def first_shard(self: CIFAR10DataModule) -> TrainSampler:
        sampler = make(self)
        return replace(sampler, layout=replace(sampler.layout, shard=0))

    CIFAR10DataModule.train_sampler = first_shard  # type: ignore[method-assign]


def _augmentation_by_rank(trainer: Any, module: Any) -> None:
    augmentation = trainer.datamodule.augmentation
    trainer.datamodule.augmentation = replace(augmentation, seed=augmentation.seed + trainer.global_rank)


def _frozen_order(trainer: Any, module: Any) -> None:
    trainer.datamodule.frozen_order = True


def _no_batchnorm_sync(trainer: Any, module: Any) -> None:
    trainer.strategy._layer_sync = None


def _padded_evaluation(trainer: Any, module: Any) -> None:
    trainer.datamodule.pad_eval = True


def _one_sample_twice(trainer: Any, module: Any) -> None:
    ids = EvaluationSampler._ids

    def first_in_place_of_last(self: EvaluationSampler) -> Tensor:
        order = ids(self)
        return torch.cat([order[:-1], order[:1]])

    EvaluationSampler._ids = first_in_place_of_last  # type: ignore[method-assign]


def _lost_optimizer_state(trainer: Any, module: Any) -> None:
    trainer.strategy.load_optimizer_state_dict = lambda checkpoint: None


def _schedule_per_process(trainer: Any, module: Any) -> None:
    step = WarmupDecay.step

    def once_for_each_process(self: WarmupDecay, *args: Any) -> None:
        for _ in range(trainer.world_size):
            step(self, *args)

    WarmupDecay.step = once_for_each_process  # type: ignore[method-assign,assignment]


def _scaled_learning_rate(trainer: Any, module: Any) -> None:
    scale = module._scale_lr

    def scaled_once_more(optimizer: Any) -> None:
        scale(optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= trainer.world_size

    module._scale_lr = scaled_once_more


def _statistics_of_last_replica(trainer: Any, module: Any) -> None:
    def run(self: VirtualReplicas, images: Tensor) -> Tensor:
        *others, last = images.chunk(self.num_replicas)
        copies = [{name: buffer.clone() for name, buffer in self.network.named_buffers()} for _ in others]
        outputs = [functional_call(self.network, copy, (part,)) for copy, part in zip(copies, others, strict=True)]
        return torch.cat([*outputs, self.network(last)])

    VirtualReplicas.__call__ = run  # type: ignore[method-assign]


def _stale_buffers(trainer: Any, module: LitResNet) -> None:
    old = {name: buffer.clone() for name, buffer in module.network.named_buffers()}
    save = module.on_save_checkpoint

    def save_with_old_buffers(checkpoint: dict[str, Any]) -> None:
        save(checkpoint)
        checkpoint["state_dict"] |= old

    module.on_save_checkpoint = save_with_old_buffers  # type: ignore[method-assign]


def _stale_stage(trainer: Any, module: Any) -> None:
    trainer.strategy._refresh_copies = lambda: None


def _local_norm(trainer: Any, module: Any) -> None:
    def norm(gradients: list[Tensor]) -> Tensor:
        squares: Tensor = torch.stack([local_part(gradient).square().sum() for gradient in gradients])
        return squares.sum().sqrt()

    trainer.strategy.gradient_norm = norm


def _dropped_microbatch(trainer: Any, module: Any) -> None:
    run = StagedRunner.__call__

    def without_last(self: StagedRunner, images: Tensor) -> Tensor:
        output = run(self, images)
        if not output.requires_grad:
            return output
        *others, last = output.tensor_split(self.num_microbatches)
        return torch.cat([*others, last.detach()])

    StagedRunner.__call__ = without_last  # type: ignore[method-assign]


def _dropped_microbatch_of_pipeline(trainer: Any, module: Any) -> None:
    loss = Pipeline._scaled_loss
    calls = count()

    def without_every_second(self: Pipeline, logits: Tensor, labels: Tensor) -> Tensor:
        weight = next(calls) % 2
        return loss(self, logits, labels) * weight

    Pipeline._scaled_loss = without_every_second  # type: ignore[method-assign]


def _unsummed_input_gradient(trainer: Any, module: Any) -> None:
    tensor_parallel._SumGradients.backward = staticmethod(lambda ctx, grad: (grad, None))  # type: ignore[method-assign]


# Microbatches must be equal, so no ragged batch; clipped, so that the norm matters.
_PIPELINE = ("--data.drop_last=true", "--trainer.gradient_clip_val=0.5")

BUGS: dict[str, Bug] = {
    bug.name: bug
    for bug in [
        Bug("no-all-reduce", "gradients are never averaged", "ddp", _no_all_reduce),
        Bug("summed-gradients", "gradients are summed, not averaged", "ddp", _summed_gradients),
        Bug("scaled-loss", "the loss is divided by the number of processes as well", "ddp", _scaled_loss),
        Bug("unweighted-batch", "parts of a ragged batch count alike", "ddp", _unweighted_ragged_batch),
        Bug("duplicated-shard", "every process reads the first part of the data", "ddp", _duplicated_shard),
        Bug("augmentation-by-rank", "each process augments with a seed of its own", "ddp", _augmentation_by_rank),
        Bug("frozen-order", "set_epoch is forgotten", "ddp", _frozen_order),
        Bug("no-batchnorm-sync", "BatchNorm is not synchronised", "ddp-sync", _no_batchnorm_sync),
        Bug("padded-evaluation", "samples are repeated until they divide", "ddp", _padded_evaluation),
        Bug("one-sample-twice", "one sample is evaluated twice, another never", "ddp", _one_sample_twice),
        Bug("lost-optimizer-state", "momentum is not restored on resume", "ddp", _lost_optimizer_state),
        Bug("schedule-per-process", "the schedule steps once for each process", "ddp", _schedule_per_process),
        Bug("scaled-learning-rate", "the rate is multiplied by the processes", "ddp", _scaled_learning_rate),
        Bug("last-replica", "running statistics of the last replica stay", "dp", _statistics_of_last_replica),
        Bug("stale-buffers", "a checkpoint has the first running statistics", "dp", _stale_buffers),
        Bug("dropped-microbatch", "the last microbatch has no gradient", "mp-micro", _dropped_microbatch, _PIPELINE),
        Bug("stale-stage", "another stage's first weights are saved", "pp", _stale_stage, _PIPELINE),
        Bug("local-norm", "each stage clips by its own norm", "pp", _local_norm, _PIPELINE),
        Bug("lost-microbatch", "every second is lost", "pp", _dropped_microbatch_of_pipeline, _PIPELINE),
        Bug("summed-shards", "sharded gradients are summed, not averaged", "fsdp2", _summed_gradients),
        Bug("partial-gradient", "the input's gradient is not summed", "tp", _unsummed_input_gradient),
    ]
}
