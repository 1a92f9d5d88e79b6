"""Mistakes that one process of a run makes, the last one, while all others do what is right.

Rank 0, which writes checkpoints and logs, is never the one.
"""

from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lit_cifar.strategies.mesh import local_part
from lit_cifar.strategies.sync_batchnorm import _Synchronised
from lit_cifar.task.metrics import EvaluationMetrics
from tests.mutations.planting import PIPELINE, Mutation, Site, in_last


@torch.no_grad()
def _shift(tensor: Tensor, by: float = 0.1) -> None:
    local_part(tensor).add_(by)


def _shifted_bias(site: Site) -> None:
    site.at("on_train_batch_end", lambda: _shift(site.module.network.fc.bias))


def _shifted_norm(site: Site) -> None:
    site.at("on_train_batch_end", lambda: _shift(site.module.network.layer1[0].bn2.bias))


def _changed_at_end(site: Site) -> None:
    site.at("on_train_end", lambda: _shift(site.module.network.conv1.weight))


def _lost_momentum(site: Site) -> None:
    batches = count(1)

    def once() -> None:
        if next(batches) == site.trainer.accumulate_grad_batches:  # after the first optimizer step
            del site.trainer.optimizers[0].state[site.module.network.fc.bias]

    site.at("on_train_batch_end", once)


def _skipped_update(site: Site) -> None:
    @torch.no_grad()
    def undone(step: Any, *args: Any, **kwargs: Any) -> Any:
        before = [parameter.clone() for parameter in site.module.parameters()]
        with torch.enable_grad():
            output = step(*args, **kwargs)
        for parameter, old in zip(site.module.parameters(), before, strict=True):
            parameter.copy_(old)
        return output

    site.replace(site.trainer.strategy, "optimizer_step", undone)


def _stale_shard(site: Site) -> None:
    def kept(step: Any, *args: Any, **kwargs: Any) -> Any:
        part = local_part(site.module.network.conv1.weight)
        before = part.detach().clone()
        output = step(*args, **kwargs)
        part.detach().copy_(before)
        return output

    site.replace(site.trainer.strategy, "optimizer_step", kept)


def _other_decay(site: Site) -> None:
    def without_decay(configure: Any) -> Any:
        configured = configure()
        for group in configured["optimizer"].param_groups:
            group["weight_decay"] = 0.0
        return configured

    site.replace(site.module, "configure_optimizers", without_decay)


def _other_rate(site: Site) -> None:
    def doubled(scale: Any, optimizer: Any) -> None:
        scale(optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= 2

    site.replace(site.module, "_scale_lr", doubled)


def _stranger(site: Site) -> None:
    def of_another_network(configure: Any) -> Any:
        configured = configure()
        parameters = configured["optimizer"].param_groups[0]["params"]
        parameters[-1] = nn.Parameter(parameters[-1].detach().clone())
        return configured

    site.replace(site.module, "configure_optimizers", of_another_network)


def _unmoved_statistics(site: Site) -> None:
    site.replace(_Synchronised, "_track", lambda track, layer, *args: None)


def _other_weights_evaluated(site: Site) -> None:
    weight = site.module.network.fc.weight
    kept = weight.detach().clone()

    def swap() -> None:
        kept.copy_(weight.detach())
        _shift(weight[0], 10.0)

    site.at("on_validation_start", swap)
    site.at("on_validation_end", lambda: weight.data.copy_(kept))


def twice(original: Any, *args: Any) -> None:
    original(*args)
    original(*args)


def metrics_twice(site: Site) -> None:
    site.replace(EvaluationMetrics, "update", twice)


def _stale_copies(site: Site) -> None:
    def of_copies(owned: Any, network: nn.Module) -> Any:
        for owner, tensor in owned(network):
            yield owner, tensor if owner == site.rank else tensor.detach().clone()

    site.replace(site.trainer.strategy, "_owned_tensors", of_copies)


MUTATIONS = [
    Mutation("shifted-bias", "one process's fc.bias moves after every batch", "ddp", in_last(_shifted_bias)),
    Mutation("changed-at-end", "one process's weights change after the last step", "ddp", in_last(_changed_at_end)),
    Mutation("lost-momentum", "one process loses the momentum of a tensor", "ddp", in_last(_lost_momentum)),
    Mutation("batch-twice", "one process counts a batch twice in val/", "ddp", in_last(metrics_twice)),
    Mutation("skipped-update", "one process does not step", "ddp", in_last(_skipped_update)),
    Mutation("other-decay", "one process has no weight decay", "ddp", in_last(_other_decay)),
    Mutation("stranger", "one optimizer has a parameter of another network", "ddp", in_last(_stranger)),
    Mutation("other-weights", "one process evaluates other weights", "ddp", in_last(_other_weights_evaluated)),
    Mutation("unmoved-statistics", "one process's statistics stay", "ddp-sync", in_last(_unmoved_statistics)),
    Mutation("other-rate", "one process has another learning rate", "ddp_spawn", in_last(_other_rate)),
    Mutation(
        "lone-replica", "one replica's weights move after every batch", "ddp_mp", in_last(_shifted_bias), devices=4
    ),
    Mutation("stale-copies", "one process keeps old copies of other stages", "pp", in_last(_stale_copies), PIPELINE),
    Mutation("lone-pipeline", "one pipeline diverges", "ddp_pp", in_last(_shifted_bias), PIPELINE, devices=4),
    Mutation("stale-shard", "one process's shard is not updated", "fsdp2", in_last(_stale_shard)),
    Mutation("shifted-norm", "one process's BatchNorm diverges", "tp", in_last(_shifted_norm)),
    Mutation("other-decay-of-part", "one process has no weight decay", "fsdp2-tp", in_last(_other_decay), devices=4),
]
