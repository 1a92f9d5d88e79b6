"""Silent mistakes for `verify` that were written without a look at how it compares, after bugs of other projects.

Each lets a training end normally and changes its weights, its results or its files. What a comment names is the public
report of such a bug. The record of 2026-11-24 has 68; here are those that no other mistake stands for: each needs
another comparison, a ragged batch, the second epoch, or the sharpness of the bound.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lit_cifar.checkpoint import exact_resume
from lit_cifar.checkpoint.callbacks import BestCheckpoint
from lit_cifar.checkpoint.sample_audit import EMPTY, SampleAudit
from lit_cifar.data.augment import Augmentation
from lit_cifar.data.images import Batch
from lit_cifar.data.loader import BatchLoader
from lit_cifar.data.samplers import EvaluationSampler
from lit_cifar.mode.tensors import local_part
from lit_cifar.reporting import evaluation_tables
from lit_cifar.strategies import fsdp2, state_dicts
from lit_cifar.strategies.mesh import MeshStrategy
from lit_cifar.strategies.mp import StagedForward
from lit_cifar.strategies.pipeline import Pipeline
from lit_cifar.task.optim import WarmupDecay
from tests.mutations.planting import MODULE, STRATEGY, Mutation, Site, planted

MUTATIONS: list[Mutation] = []
mutation = partial(planted, MUTATIONS)

UNCUT = ("--trainer.accumulate_grad_batches=1",)  # with it pipelines of several replicas can cut the ragged batch too
ADAM = ("--model.optimizer=AdamW", "--model.optimizer.lr=0.001")


def _clones(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _states(site: Site) -> Iterator[dict[str, Any]]:
    return iter(site.trainer.optimizers[0].state.values())


# Copies that are not brought up to date


@mutation("copies of buffers are not refreshed", "pp", STRATEGY, "_owned_tensors")
def _parameters_refreshed(site: Site, owned: Any, network: nn.Module) -> Iterator[tuple[int, Tensor]]:
    return ((owner, tensor) for owner, tensor in owned(network) if isinstance(tensor, nn.Parameter))


# huggingface/pytorch-image-models#110
@mutation("each replica evaluates its own statistics", "fsdp2")
def _own_shard_statistics(site: Site) -> None:
    site.replace(site.trainer.strategy, "on_validation_start", lambda take_first: None)


@mutation("the file has each rank's momentum in another's place", "tp", STRATEGY, "optimizer_state")
def _swapped_shards(site: Site, gather: Any, optimizer: Any) -> dict[str, Any]:
    whole: dict[str, Any] = gather(optimizer)
    for index, entry in optimizer.state_dict()["state"].items():
        for name, part in entry.items():
            if isinstance(part, DTensor) and (dims := [p.dim for p in part.placements if isinstance(p, Shard)]):
                tensor = whole["state"][index][name]
                whole["state"][index][name] = tensor.roll(tensor.shape[dims[0]] // 2, dims[0])
    return whole


@mutation("the file has a stage's old buffer", "ddp_mp", devices=4)
def _stale_buffer(site: Site) -> None:
    name, buffer = [*site.module.network.named_buffers()][-2]  # the running variance of the last layer that has one
    old = [buffer.clone()]
    site.at("on_train_batch_start", lambda: old.__setitem__(0, buffer.clone()))

    def with_old(save: Any, checkpoint: dict[str, Any]) -> None:
        save(checkpoint)
        checkpoint["state_dict"][name] = old[0]

    site.replace(site.module, "on_save_checkpoint", with_old)


@mutation("the network gets its first buffers back", "fsdp2", fsdp2, "whole_state")
def _old_statistics(site: Site, collect: Any, state: dict[str, Any]) -> dict[str, Any]:
    whole = dict(site.trainer.strategy._whole.named_buffers())
    found: dict[str, Any] = collect(state)
    return found | (whole if whole.keys() <= state.keys() else {})


@mutation("the file has a tensor's momentum of the step before", "mp")
def _stale_momentum(site: Site) -> None:
    old: dict[int, Tensor] = {}
    weight = site.module.network.fc.weight

    def note() -> None:
        for state in [site.trainer.optimizers[0].state[weight]]:
            old.update({39: state["momentum_buffer"].clone()} if state else {})

    def with_old(save: Any, checkpoint: dict[str, Any]) -> None:
        save(checkpoint)
        for index, momentum in old.items():
            checkpoint["optimizer_states"][0]["state"][index]["momentum_buffer"] = momentum

    site.at("on_before_optimizer_step", note)
    site.replace(site.module, "on_save_checkpoint", with_old)


@mutation("only means are the first pipeline's", "ddp_pp", STRATEGY, "local_buffers", args=UNCUT, devices=4)
def _means_alone(site: Site, buffers: Any) -> list[Tensor]:
    stages = site.trainer.strategy.pipeline.stages.values()
    return [buffer for stage in stages for name, buffer in stage.named_buffers() if name.endswith("running_mean")]


@mutation("the file has own columns twice", "fsdp2-tp", devices=4)
def _own_part_for_all(site: Site) -> None:
    shape = site.module.network.fc.weight.shape

    def own_columns(gather: Any, tensor: DTensor) -> Tensor:
        whole: Tensor = gather(tensor).clone()
        if whole.shape == shape:
            whole[:, shape[1] // 2 :] = whole[:, : shape[1] // 2]
        return whole

    site.replace(state_dicts, "_gather", own_columns)


# hpcaitech/ColossalAI#1259
@mutation("the file has the first stage's momentum alone", "pp", STRATEGY, "optimizer_state")
def _state_of_one_stage(site: Site, merge: Any, optimizer: Any) -> dict[str, Any]:
    state: dict[str, Any] = site.trainer.strategy.part_of_state(merge(optimizer), optimizer)
    return state


# Evaluation


@mutation("cut by strides, joined as blocks", "mp-micro", StagedForward, "__call__")
def _strided_microbatches(site: Site, run: Any, forward_fn: StagedForward, images: Tensor) -> Any:
    if torch.is_grad_enabled():
        return run(forward_fn, images)
    return torch.cat([run(forward_fn, images[start :: forward_fn.num_microbatches]) for start in range(2)])


@mutation("the last batch is compared with shifted labels", "single", BatchLoader, "__iter__")
def _labels_of_others(site: Site, iterate: Any, loader: BatchLoader) -> Iterator[Batch]:
    *others, last = iterate(loader)
    yield from others
    yield last._replace(labels=last.labels.roll(1)) if isinstance(loader.sampler, EvaluationSampler) else last


@mutation("one rank's first batch is evaluated in training mode", "ddp_spawn", MODULE, "validation_step", last=True)
def _first_in_training(site: Site, evaluate: Any, batch: Batch, batch_idx: int) -> Any:
    site.module.network.train(batch_idx == 0)
    output = evaluate(batch, batch_idx)
    site.module.network.eval()
    return output


@mutation("confusion.csv is transposed", "ddp", evaluation_tables, "write_confusion")
def _transposed(site: Site, write: Any, folder: Any, split: str, classes: Any, counts: Any) -> None:
    write(folder, split, classes, [*zip(*counts, strict=True)])


@mutation("confusion.csv has the first rank's counts alone", "fsdp2", MODULE, "on_validation_epoch_start")
def _own_confusion(site: Site, start: Any) -> None:
    start()
    site.set(site.module.val_metrics.confusion, "_to_sync", False)


@mutation("the counts of replicas are swapped", "dp")
def _ranks_in_reverse(site: Site) -> None:
    last = site.trainer.strategy.local_replicas - 1
    site.replace(site.trainer.strategy, "replica_of", lambda replica_of, num_samples: last - replica_of(num_samples))


# Lightning-AI/pytorch-lightning#3728
@mutation("confusion.csv is not reset", "single")
def _counts_of_all_epochs(site: Site) -> None:
    site.replace(site.module, "on_validation_epoch_start", lambda reset: None)


# catalyst-team/catalyst#799
@mutation("val/loss is the mean of batches", "ddp_mp", devices=4)
def _mean_of_batches(site: Site) -> None:
    site.replace(site.module.val_metrics.loss, "update", lambda update, losses: update(losses.mean()[None]))


@mutation("one rank evaluates in float32", "ddp-sync", MODULE, "_evaluated", last=True)
def _narrow_evaluation(site: Site, evaluated: Any, images: Tensor) -> Any:
    return evaluated(images).float().to(images.dtype)


@mutation("metrics count each process of a replica", "tp")
def _counts_of_replica(site: Site) -> None:
    site.replace(MeshStrategy, "_count_along_data", lambda count, strategy, group: None)


# Checkpoint and resume


# THUDM/slime#1547
@mutation("the schedule resumes a step behind", "dp", WarmupDecay, "load_state_dict")
def _schedule_behind(site: Site, load: Any, schedule: WarmupDecay, state: dict[str, Any]) -> None:
    load(schedule, state | {"last_epoch": state["last_epoch"] - 1})


# mosaicml/streaming#869
@mutation("a resumed epoch is augmented as the first", "tp")
def _first_draws(site: Site) -> None:
    resumed: list[bool] = []

    def note(load: Any, *args: Any) -> None:
        resumed.append(True)
        load(*args)

    def draw(original: Any, augmentation: Augmentation, ids: Tensor, size: Any, *, epoch: int) -> Any:
        return original(augmentation, ids, size, epoch=0 if resumed else epoch)

    site.replace(exact_resume.ExactResume, "on_load_checkpoint", note)
    site.replace(Augmentation, "draw", draw)


@mutation("Adam's step is 0 on resume", "ddp", STRATEGY, "load_optimizer_state_dict", args=ADAM)
def _adam_counts_again(site: Site, load: Any, checkpoint: Any) -> None:
    load(checkpoint)
    for state in _states(site):
        state["step"].zero_()


@mutation("momentum resumes in float32", "ddp", STRATEGY, "load_optimizer_state_dict")
def _narrow_momentum(site: Site, load: Any, checkpoint: Any) -> None:
    load(checkpoint)
    for state in _states(site):
        state["momentum_buffer"].copy_(state["momentum_buffer"].float())


# pytorch/pytorch#1489
@mutation("momentum resumes in another order", "fsdp2", STRATEGY, "part_of_state")
def _momenta_of_neighbours(site: Site, split: Any, state: dict[str, Any], optimizer: Any) -> Any:
    entries = dict(state["state"])
    entries[1], entries[2] = entries[2], entries[1]  # of the first BatchNorm's weight and bias
    return split(state | {"state": entries}, optimizer)


@mutation("each rank resumes with the counts of all", "ddp", exact_resume, "_restore")
def _counts_of_all(site: Site, restore: Any, module: Any, collected: Any, *, data_parallel_rank: int) -> None:
    restore(module, collected, data_parallel_rank=0)


# Lightning-AI/pytorch-lightning#20185
@mutation("best.ckpt has the weights of the step before", "single")
def _best_of_before(site: Site) -> None:
    old: dict[str, Tensor] = {}
    network = site.module.network
    site.at("on_train_batch_start", lambda: old.update(_clones(network.state_dict())))

    def saved(save: Any, *args: Any) -> None:
        new = _clones(network.state_dict())
        network.load_state_dict(old)
        save(*args)
        network.load_state_dict(new)

    site.replace(BestCheckpoint, "_save_checkpoint", saved)


@mutation("the sample audit forgets on resume the epochs before", "ddp_spawn", SampleAudit, "on_load_checkpoint")
def _audit_anew(site: Site, load: Any, callback: SampleAudit, *args: Any) -> None:
    load(callback, *args)
    site.set(callback, "_digest", EMPTY)


@mutation("the header of metrics.csv counts as a row", "ddp")
def _header_as_row(site: Site) -> None:
    site.replace(exact_resume, "_num_rows", lambda num_rows, trainer: num_rows(trainer) + 1)


@mutation("running statistics start again on resume", "mp", STRATEGY, "load_model_state_dict")
def _buffers_not_restored(site: Site, load: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    own = {name: buffer for name, buffer in site.module.state_dict().items() if ".running_" in name}
    load({**checkpoint, "state_dict": checkpoint["state_dict"] | own}, *args, **kwargs)


# Lightning-AI/pytorch-lightning#850
@mutation("the file's epoch is one too high", "dp", MODULE, "on_save_checkpoint")
def _epoch_ahead(site: Site, save: Any, checkpoint: dict[str, Any]) -> None:
    save(checkpoint)
    checkpoint["epoch"] += 1


# Hard sizes and the second epoch


@mutation("weight decay acts twice in a ragged step", "tp", STRATEGY, "optimizer_step")
def _decays_twice(site: Site, original: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(*args, **kwargs)
    if site.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
        for group in site.trainer.optimizers[0].param_groups:
            for parameter in group["params"]:
                local_part(parameter).detach().mul_(1 - group["lr"] * group["weight_decay"])
    return output


@mutation("train/loss is not reset", "mp")
def _loss_of_epochs(site: Site) -> None:
    site.replace(site.module.train_loss, "reset", lambda reset: None)


@mutation("unequal microbatches have equal weight", "pp", Pipeline, "_train_unequal")
def _equal_microbatches(site: Site, train: Any, pipeline: Pipeline, images: Any, labels: Any, scales: Any) -> Any:
    share = sum(map(len, labels)) / len(labels)
    return train(pipeline, images, labels, [s * share / len(y) for s, y in zip(scales, labels, strict=True)])


# Reduction


@mutation("gradients are averaged in float32", "ddp", at="on_before_optimizer_step")
def _narrow_reduction(site: Site) -> None:
    for parameter in site.module.network.parameters():
        parameter.grad.copy_(parameter.grad.float())


# huggingface/accelerate#1624
@mutation("a new epoch begins without averages", "ddp_spawn", at="on_train_batch_start")
def _no_sync_leaks(site: Site) -> None:
    in_first_step = site.trainer.fit_loop.epoch_loop.batch_idx < site.trainer.accumulate_grad_batches
    synchronises = site.trainer.current_epoch == 0 or not in_first_step
    site.set(site.trainer.strategy.model, "require_backward_grad_sync", synchronises)
