"""Silent mistakes for `verify` that were written without a look at how it compares, after bugs of other projects.

Each lets a training end normally and changes its weights, its results or its files. What a comment names is the public
report of such a bug. The record of 2026-11-24 has 68; here is at least one for each mode, each for another comparison.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_cifar.checkpoint import exact_resume
from lit_cifar.checkpoint.callbacks import BestCheckpoint
from lit_cifar.checkpoint.sample_audit import EMPTY, SampleAudit
from lit_cifar.data.augment import Augmentation
from lit_cifar.strategies import state_dicts
from lit_cifar.strategies.mp import StagedForward
from tests.mutations.planting import MODULE, STRATEGY, Mutation, Site, planted

MUTATIONS: list[Mutation] = []
mutation = partial(planted, MUTATIONS)

UNCUT = ("--trainer.accumulate_grad_batches=1",)  # with it pipelines of several replicas can cut the ragged batch too


def _clones(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


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


@mutation("confusion.csv has the first rank's counts alone", "fsdp2", at="on_validation_epoch_start")
def _own_confusion(site: Site) -> None:
    site.set(site.module.val_metrics.confusion, "_to_sync", False)


# catalyst-team/catalyst#799
@mutation("val/loss is the mean of batches", "ddp_mp", devices=4)
def _mean_of_batches(site: Site) -> None:
    site.replace(site.module.val_metrics.loss, "update", lambda update, losses: update(losses.mean()[None]))


@mutation("one rank evaluates in float32", "ddp-sync", MODULE, "_evaluated", last=True)
def _narrow_evaluation(site: Site, evaluated: Any, images: Tensor) -> Any:
    return evaluated(images).float().to(images.dtype)


# Checkpoint and resume


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


@mutation("running statistics start again on resume", "mp", STRATEGY, "load_model_state_dict")
def _buffers_not_restored(site: Site, load: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    own = {name: buffer for name, buffer in site.module.state_dict().items() if ".running_" in name}
    load({**checkpoint, "state_dict": checkpoint["state_dict"] | own}, *args, **kwargs)


# Lightning-AI/pytorch-lightning#850
@mutation("the file's epoch is one too high", "dp", MODULE, "on_save_checkpoint")
def _epoch_ahead(site: Site, save: Any, checkpoint: dict[str, Any]) -> None:
    save(checkpoint)
    checkpoint["epoch"] += 1


@mutation("gradients are averaged in float32", "ddp", at="on_before_optimizer_step")
def _narrow_reduction(site: Site) -> None:
    for parameter in site.module.network.parameters():
        parameter.grad.copy_(parameter.grad.float())
