"""Mistakes that all processes of a run make, as they run the same wrong code."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
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
from lit_cifar.reporting.evaluation_tables import PerRankAccuracy
from lit_cifar.strategies import ProcessSyncBatchNorm, tp
from lit_cifar.strategies.dp import EmulatedReplicas
from lit_cifar.strategies.mesh import local_part
from lit_cifar.strategies.mp import StagedRunner
from lit_cifar.strategies.pipeline import Pipeline
from lit_cifar.task.optim import WarmupDecay
from tests.mutations.of_one_process import metrics_twice, twice
from tests.mutations.planting import PIPELINE, Mutation, Site


def _ddp_without(setting: str) -> Callable[[Site], None]:
    """DistributedDataParallel with this attribute false."""

    def plant_it(site: Site) -> None:
        def configured(configure: Any, strategy: Any) -> None:
            configure(strategy)
            site.set(strategy.model, setting, False)

        site.replace(DDPStrategy, "configure_ddp", configured)

    return plant_it


_no_all_reduce, _own_statistics = _ddp_without("require_backward_grad_sync"), _ddp_without("broadcast_buffers")


def _summed_gradients(site: Site) -> None:
    def summed(backward: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        backward(loss * site.trainer.world_size, *args, **kwargs)

    site.replace(site.trainer.strategy, "backward", summed)


def _scaled_loss(site: Site) -> None:
    site.replace(site.module, "training_step", lambda step, *args: step(*args) / site.trainer.world_size)


def _summed_accumulation(site: Site) -> None:
    times = site.trainer.accumulate_grad_batches
    site.replace(site.module, "training_step", lambda step, *args: step(*args) * times)


def _lost_accumulation(site: Site) -> None:
    def from_zero(backward: Any, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        site.module.zero_grad()
        backward(loss, optimizer, *args, **kwargs)

    site.replace(site.trainer.strategy, "backward", from_zero)


def _unweighted_ragged_batch(site: Site) -> None:
    def unweighted(iterate: Any, sampler: TrainSampler) -> Iterator[BatchIds]:
        for part in iterate(sampler):
            yield part._replace(weight=1.0)

    site.replace(TrainSampler, "__iter__", unweighted)


def _duplicated_part(site: Site) -> None:
    def first_rank(make: Any, datamodule: CIFAR10DataModule) -> TrainSampler:
        sampler: TrainSampler = make(datamodule)
        return replace(sampler, batch_split=replace(sampler.batch_split, dp_rank=0))

    site.replace(CIFAR10DataModule, "train_sampler", first_rank)


def _augmentation_by_rank(site: Site) -> None:
    def of_rank(draw: Any, augmentation: Augmentation, *args: Any, **kwargs: Any) -> Tensor:
        keyed_by_rank = replace(augmentation, seed=augmentation.seed + site.rank)
        draws: Tensor = draw(keyed_by_rank, *args, **kwargs)
        return draws

    site.replace(Augmentation, "draw", of_rank)


def _frozen_order(site: Site) -> None:
    site.replace(TrainSampler, "set_epoch", lambda set_epoch, sampler, epoch: set_epoch(sampler, 0))


def _no_batchnorm_sync(site: Site) -> None:
    site.replace(ProcessSyncBatchNorm, "apply", lambda apply, plugin, network: network)


def _padded_evaluation(site: Site) -> None:
    def padded(ids: Any, sampler: EvaluationSampler) -> Tensor:
        order: Tensor = ids(sampler)
        return torch.cat([order, order[: -len(order) % sampler.batch_split.dp_size]])

    site.replace(EvaluationSampler, "_ids", padded)


def _one_sample_twice(site: Site) -> None:
    def first_in_place_of_last(ids: Any, sampler: EvaluationSampler) -> Tensor:
        order: Tensor = ids(sampler)
        return torch.cat([order[:-1], order[:1]])

    site.replace(EvaluationSampler, "_ids", first_in_place_of_last)


def _predictions_twice(site: Site) -> None:
    site.replace(PerRankAccuracy, "_count", twice)


def _metrics_of_each(site: Site) -> None:
    site.replace(Metric, "sync", lambda sync, metric, *args, **kwargs: None)


def _lost_optimizer_state(site: Site) -> None:
    site.replace(site.trainer.strategy, "load_optimizer_state_dict", lambda load, checkpoint: None)


def _lost_schedule(site: Site) -> None:
    site.replace(WarmupDecay, "load_state_dict", lambda load, schedule, state: None)


def _schedule_per_process(site: Site) -> None:
    def once_for_each_process(step: Any, schedule: WarmupDecay, *args: Any) -> None:
        for _ in range(site.trainer.world_size):
            step(schedule, *args)

    site.replace(WarmupDecay, "step", once_for_each_process)


def _scaled_learning_rate(site: Site) -> None:
    def scaled_once_more(scale: Any, optimizer: Any) -> None:
        scale(optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= site.trainer.world_size

    site.replace(site.module, "_scale_lr", scaled_once_more)


def _statistics_of_last_replica(site: Site) -> None:
    def last_on_own_buffers(run: Any, replicas: EmulatedReplicas, images: Tensor) -> Tensor:
        *others, last = images.chunk(replicas.num_replicas)
        copies = [{name: buffer.clone() for name, buffer in replicas.network.named_buffers()} for _ in others]
        outputs = [functional_call(replicas.network, copy, (part,)) for copy, part in zip(copies, others, strict=True)]
        return torch.cat([*outputs, replicas.network(last)])

    site.replace(EmulatedReplicas, "__call__", last_on_own_buffers)


def _stale_buffers(site: Site) -> None:
    old = {name: buffer.clone() for name, buffer in site.module.network.named_buffers()}

    def with_old_buffers(save: Any, checkpoint: dict[str, Any]) -> None:
        save(checkpoint)
        checkpoint["state_dict"] |= old

    site.replace(site.module, "on_save_checkpoint", with_old_buffers)


def _dropped_microbatch(site: Site) -> None:
    def without_last(run: Any, runner: StagedRunner, images: Tensor) -> Tensor:
        output: Tensor = run(runner, images)
        if not output.requires_grad:
            return output
        *others, last = output.tensor_split(runner.num_microbatches)
        return torch.cat([*others, last.detach()])

    site.replace(StagedRunner, "__call__", without_last)


def _copied_stage(site: Site) -> None:
    def with_copy(make: Any, runner: StagedRunner, stages: Any, *args: Any, **kwargs: Any) -> None:
        *others, last = stages
        make(runner, [*others, deepcopy(last)], *args, **kwargs)

    site.replace(StagedRunner, "__init__", with_copy)


def _unaveraged_stage(site: Site) -> None:
    def without_last_stage(configure: Any, strategy: Any) -> None:
        ddp: Any = DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(site.module, ["network.fc.weight", "network.fc.bias"])
        configure(strategy)

    site.replace(DDPStrategy, "configure_ddp", without_last_stage)


def _stale_stage(site: Site) -> None:
    site.replace(site.trainer.strategy, "_refresh_copies", lambda refresh: None)


def _local_norm(site: Site) -> None:
    def norm(of_all: Any, gradients: list[Tensor]) -> Tensor:
        squares: Tensor = torch.stack([local_part(gradient).square().sum() for gradient in gradients])
        return squares.sum().sqrt()

    site.replace(site.trainer.strategy, "gradient_norm", norm)


def _lost_microbatch_of_pipeline(site: Site) -> None:
    calls = count()

    def without_every_second(loss: Any, pipeline: Pipeline, logits: Tensor, labels: Tensor) -> Tensor:
        scaled: Tensor = loss(pipeline, logits, labels)
        return scaled * (next(calls) % 2)

    site.replace(Pipeline, "_scaled_loss", without_every_second)


def _unaveraged_pipelines(site: Site) -> None:
    site.replace(site.trainer.strategy, "post_backward", lambda average, loss: None)


def _unsummed_input_gradient(site: Site) -> None:
    site.replace(tp._SumGradients, "backward", lambda backward, ctx, grad: (grad, None))


MUTATIONS = [
    Mutation("lost-schedule", "the learning rate schedule restarts on resume", "single", _lost_schedule),
    Mutation("last-replica", "running statistics are the last replica's", "dp", _statistics_of_last_replica),
    Mutation("stale-buffers", "a checkpoint has the initial running statistics", "dp", _stale_buffers),
    Mutation("no-all-reduce", "gradients are never averaged", "ddp", _no_all_reduce),
    Mutation("summed-gradients", "gradients are summed, not averaged", "ddp", _summed_gradients),
    Mutation("scaled-loss", "the loss is divided by the number of processes as well", "ddp", _scaled_loss),
    Mutation("summed-accumulation", "accumulated gradients are summed, not averaged", "ddp", _summed_accumulation),
    Mutation("unweighted-batch", "unequal parts of a ragged batch have equal weight", "ddp", _unweighted_ragged_batch),
    Mutation("duplicated-shard", "every process reads the first part of the data", "ddp", _duplicated_part),
    Mutation("augmentation-by-rank", "each process augments with a seed of its own", "ddp", _augmentation_by_rank),
    Mutation("frozen-order", "set_epoch is forgotten", "ddp", _frozen_order),
    Mutation("own-statistics", "each process evaluates with its own running statistics", "ddp", _own_statistics),
    Mutation("padded-evaluation", "evaluation is padded with repeated samples", "ddp", _padded_evaluation),
    Mutation("one-sample-twice", "one sample is evaluated twice, another never", "ddp", _one_sample_twice),
    Mutation("predictions-twice", "every prediction is counted twice", "ddp", _predictions_twice),
    Mutation("metrics-twice", "every batch is counted twice in the logged val/ metrics", "ddp", metrics_twice),
    Mutation("metrics-of-each", "metrics are not summed over the processes", "ddp", _metrics_of_each),
    Mutation("lost-optimizer-state", "momentum is not restored on resume", "ddp", _lost_optimizer_state),
    Mutation("schedule-per-process", "the schedule steps once for each process", "ddp", _schedule_per_process),
    Mutation("scaled-learning-rate", "the rate is multiplied by the world size", "ddp", _scaled_learning_rate),
    Mutation("no-batchnorm-sync", "BatchNorm is not synchronised", "ddp-sync", _no_batchnorm_sync),
    Mutation("copied-stage", "a device computes with a copy that is not trained", "mp", _copied_stage),
    Mutation("dropped-microbatch", "the last microbatch has no gradient", "mp-micro", _dropped_microbatch, PIPELINE),
    Mutation("unaveraged-stage", "the last layer's gradient is not averaged", "ddp_mp", _unaveraged_stage, devices=4),
    Mutation("stale-stage", "another stage's first weights are saved", "pp", _stale_stage, PIPELINE),
    Mutation("local-norm", "each stage clips by its own norm", "pp", _local_norm, PIPELINE),
    Mutation("lost-microbatch", "every second is lost", "pp", _lost_microbatch_of_pipeline, PIPELINE),
    Mutation("lone-pipelines", "pipelines do not average", "ddp_pp", _unaveraged_pipelines, PIPELINE, devices=4),
    Mutation("summed-shards", "sharded gradients are summed, not averaged", "fsdp2", _summed_gradients),
    Mutation("lost-accumulation", "gradients are zeroed between accumulation steps", "fsdp2", _lost_accumulation),
    Mutation("partial-gradient", "the input's gradient is not summed", "tp", _unsummed_input_gradient),
]
