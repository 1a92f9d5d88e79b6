"""Mistakes that all processes of a run make, as they run the same wrong code."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lit_cifar.data.augment import Augmentation
from lit_cifar.data.datamodule import CIFAR10DataModule
from lit_cifar.data.samplers import BatchIds, EvaluationSampler, TrainSampler
from lit_cifar.reporting.evaluation_tables import EvaluationTables
from lit_cifar.strategies import ProcessSyncBatchNorm, pp, tp
from lit_cifar.strategies.dp import EmulatedReplicas
from lit_cifar.strategies.mp import StagedForward
from lit_cifar.strategies.pipeline import Pipeline
from lit_cifar.task.metrics import EvaluationMetrics
from lit_cifar.task.optim import WarmupDecay
from lit_cifar.task.optimization import RateScaling
from tests.mutations.planting import PIPELINE, STRATEGY, Mutation, Site, planted

MUTATIONS: list[Mutation] = []
mutation = partial(planted, MUTATIONS)


@mutation("gradients are never averaged", "ddp", DDPStrategy, "configure_ddp")
def _no_all_reduce(site: Site, configure: Any, strategy: Any) -> None:
    configure(strategy)
    site.set(strategy.model, "require_backward_grad_sync", False)


@mutation("each process evaluates with its own running statistics", "ddp", DDPStrategy, "configure_ddp")
def _own_statistics(site: Site, configure: Any, strategy: Any) -> None:
    configure(strategy)
    site.set(strategy.model, "broadcast_buffers", False)


@mutation("gradients are summed, not averaged", "ddp", STRATEGY, "backward")
@mutation("sharded gradients are summed, not averaged", "fsdp2", STRATEGY, "backward", name="summed-shards")
def _summed_gradients(site: Site, backward: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    backward(loss * site.trainer.world_size, *args, **kwargs)


@mutation("the loss is divided by the number of processes as well", "ddp")
def _scaled_loss(site: Site) -> None:
    site.replace(site.module, "training_step", lambda step, *args: step(*args) / site.trainer.world_size)


@mutation("accumulated gradients are summed, not averaged", "ddp")
def _summed_accumulation(site: Site) -> None:
    times = site.trainer.accumulate_grad_batches
    site.replace(site.module, "training_step", lambda step, *args: step(*args) * times)


@mutation("gradients are zeroed between accumulation steps", "fsdp2", STRATEGY, "backward")
def _lost_accumulation(site: Site, backward: Any, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    site.module.zero_grad()
    backward(loss, optimizer, *args, **kwargs)


@mutation("unequal parts of a ragged batch have equal weight", "ddp", TrainSampler, "__iter__")
def _unweighted_batch(site: Site, iterate: Any, sampler: TrainSampler) -> Iterator[BatchIds]:
    for part in iterate(sampler):
        yield part._replace(weight=1.0)


@mutation("every process reads the first part of the data", "ddp", CIFAR10DataModule, "train_sampler")
def _duplicated_shard(site: Site, make: Any, datamodule: CIFAR10DataModule) -> TrainSampler:
    sampler: TrainSampler = make(datamodule)
    return replace(sampler, layout=replace(sampler.layout, data_parallel_rank=0))


@mutation("each process augments with a seed of its own", "ddp", Augmentation, "draw")
def _augmentation_by_rank(site: Site, draw: Any, augmentation: Augmentation, *args: Any, **kwargs: Any) -> Tensor:
    keyed_by_rank = replace(augmentation, seed=augmentation.seed + site.rank)
    draws: Tensor = draw(keyed_by_rank, *args, **kwargs)
    return draws


@mutation("set_epoch is forgotten", "ddp")
def _frozen_order(site: Site) -> None:
    site.replace(TrainSampler, "set_epoch", lambda set_epoch, sampler, epoch: set_epoch(sampler, 0))


@mutation("BatchNorm is not synchronised", "ddp-sync")
def _no_batchnorm_sync(site: Site) -> None:
    site.replace(ProcessSyncBatchNorm, "apply", lambda apply, plugin, network: network)


@mutation("evaluation is padded with repeated samples", "ddp", EvaluationSampler, "_ids")
def _padded_evaluation(site: Site, ids: Any, sampler: EvaluationSampler) -> Tensor:
    order: Tensor = ids(sampler)
    return torch.cat([order, order[: -len(order) % sampler.layout.data_parallel_size]])


@mutation("one sample is evaluated twice, another never", "ddp", EvaluationSampler, "_ids")
def _one_sample_twice(site: Site, ids: Any, sampler: EvaluationSampler) -> Tensor:
    order: Tensor = ids(sampler)
    return torch.cat([order[:-1], order[:1]])


@mutation("every batch is counted twice in the logged val/ metrics", "ddp", EvaluationMetrics, "update")
@mutation("predictions are counted twice", "ddp", EvaluationTables, "on_validation_batch_end", name="predictions-twice")
def _metrics_twice(site: Site, count: Any, *args: Any) -> None:
    count(*args)
    count(*args)


@mutation("metrics are not summed over the processes", "ddp")
def _metrics_of_each(site: Site) -> None:
    site.replace(Metric, "sync", lambda sync, metric, *args, **kwargs: None)


@mutation("momentum is not restored on resume", "ddp")
def _lost_optimizer_state(site: Site) -> None:
    site.replace(site.trainer.strategy, "load_optimizer_state_dict", lambda load, checkpoint: None)


@mutation("the learning rate schedule restarts on resume", "single")
def _lost_schedule(site: Site) -> None:
    site.replace(WarmupDecay, "load_state_dict", lambda load, schedule, state: None)


@mutation("the schedule steps once for each process", "ddp", WarmupDecay, "step")
def _schedule_per_process(site: Site, step: Any, schedule: WarmupDecay, *args: Any) -> None:
    for _ in range(site.trainer.world_size):
        step(schedule, *args)


@mutation("the rate is multiplied by the world size", "ddp", RateScaling, "factor")
def _scaled_learning_rate(site: Site, factor: Any, *args: Any) -> float:
    return float(factor(*args) * site.trainer.world_size)


@mutation("running statistics are the last replica's", "dp", EmulatedReplicas, "__call__")
def _last_replica(site: Site, run: Any, replicas: EmulatedReplicas, images: Tensor) -> Tensor:
    *others, last = images.chunk(replicas.num_replicas)
    copies = [{name: buffer.clone() for name, buffer in replicas.network.named_buffers()} for _ in others]
    outputs = [functional_call(replicas.network, copy, (part,)) for copy, part in zip(copies, others, strict=True)]
    return torch.cat([*outputs, replicas.network(last)])


@mutation("a checkpoint has the initial running statistics", "dp")
def _stale_buffers(site: Site) -> None:
    old = {name: buffer.clone() for name, buffer in site.module.network.named_buffers()}

    def with_old_buffers(save: Any, checkpoint: dict[str, Any]) -> None:
        save(checkpoint)
        checkpoint["state_dict"] |= old

    site.replace(site.module, "on_save_checkpoint", with_old_buffers)


@mutation("the last microbatch has no gradient", "mp-micro", StagedForward, "__call__", args=PIPELINE)
def _dropped_microbatch(site: Site, run: Any, forward_fn: StagedForward, images: Tensor) -> Tensor:
    output: Tensor = run(forward_fn, images)
    if not output.requires_grad:
        return output
    *others, last = output.tensor_split(forward_fn.num_microbatches)
    return torch.cat([*others, last.detach()])


@mutation("a device computes with a copy that is not trained", "mp", StagedForward, "__init__")
def _copied_stage(site: Site, make: Any, forward_fn: StagedForward, stages: Any, *args: Any, **kwargs: Any) -> None:
    *others, last = stages
    copied = deepcopy(last)

    def follow(*_: Any) -> None:  # else the copy would normalise while evaluating, which one image alone cannot be
        for its, module in zip(copied.modules(), last.modules(), strict=True):
            its.training = module.training

    copied.register_forward_pre_hook(follow)
    make(forward_fn, [*others, copied], *args, **kwargs)


@mutation("the last layer's gradient is not averaged", "ddp_mp", DDPStrategy, "configure_ddp", devices=4)
def _unaveraged_stage(site: Site, configure: Any, strategy: Any) -> None:
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(site.module, ["network.fc.weight", "network.fc.bias"])
    configure(strategy)


@mutation("another stage's first weights are saved", "pp", args=PIPELINE)
def _stale_stage(site: Site) -> None:
    site.replace(site.trainer.strategy, "_refresh_copies", lambda refresh: None)


@mutation("each stage clips by its own norm", "pp", pp, "clip_by_whole_norm", args=PIPELINE)
def _local_norm(site: Site, clip: Any, *args: Any, group: Any, **others: Any) -> None:
    clip(*args, **others)


@mutation("every second is lost", "pp", args=PIPELINE)
def _lost_microbatch(site: Site) -> None:
    calls = count()

    def without_every_second(loss: Any, pipeline: Pipeline, logits: Tensor, labels: Tensor) -> Tensor:
        scaled: Tensor = loss(pipeline, logits, labels)
        return scaled * (next(calls) % 2)

    site.replace(Pipeline, "_scaled_loss", without_every_second)


@mutation("pipelines do not average", "ddp_pp", args=PIPELINE, devices=4)
def _lone_pipelines(site: Site) -> None:
    site.replace(site.trainer.strategy, "average_gradients", lambda average: None)


@mutation("the input's gradient is not summed", "tp")
def _partial_gradient(site: Site) -> None:
    site.replace(tp._SumGradients, "backward", lambda backward, ctx, grad: (grad, None))
