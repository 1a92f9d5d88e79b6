"""Mistakes that one process of a run makes, the last one, while all others do what is right.

Rank 0, which writes checkpoints and logs, is never the one.
"""

from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lit_cifar.mode.tensors import local_part
from lit_cifar.strategies.sync_batchnorm import _Synchronised
from lit_cifar.task.metrics import EvaluationMetrics
from lit_cifar.task.optimization import RateScaling
from tests.mutations.planting import MODULE, PIPELINE, STRATEGY, Mutation, Site, planted

MUTATIONS: list[Mutation] = []
mutation = partial(planted, MUTATIONS, last=True)


@torch.no_grad()
def _shift(tensor: Tensor, by: float = 0.1) -> None:
    local_part(tensor).add_(by)


@mutation("one process's fc.bias moves after every batch", "ddp")
@mutation("one replica's weights move after every batch", "ddp_mp", name="lone-replica", devices=4)
@mutation("one pipeline diverges", "ddp_pp", name="lone-pipeline", args=PIPELINE, devices=4)
def _shifted_bias(site: Site) -> None:
    site.at("on_train_batch_end", lambda: _shift(site.module.network.fc.bias))


@mutation("one process's BatchNorm diverges", "tp")
def _shifted_norm(site: Site) -> None:
    site.at("on_train_batch_end", lambda: _shift(site.module.network.layer1[0].bn2.bias))


@mutation("one process's weights change after the last step", "ddp")
def _changed_at_end(site: Site) -> None:
    site.at("on_train_end", lambda: _shift(site.module.network.conv1.weight))


@mutation("one process loses the momentum of a tensor", "ddp")
def _lost_momentum(site: Site) -> None:
    batches = count(1)

    def once() -> None:
        if next(batches) == site.trainer.accumulate_grad_batches:  # after the first optimizer step
            del site.trainer.optimizers[0].state[site.module.network.fc.bias]

    site.at("on_train_batch_end", once)


@mutation("one process does not step", "ddp", STRATEGY, "optimizer_step")
@torch.no_grad()
def _skipped_update(site: Site, step: Any, *args: Any, **kwargs: Any) -> Any:
    before = [parameter.clone() for parameter in site.module.parameters()]
    with torch.enable_grad():
        output = step(*args, **kwargs)
    for parameter, old in zip(site.module.parameters(), before, strict=True):
        parameter.copy_(old)
    return output


@mutation("one process's shard is not updated", "fsdp2", STRATEGY, "optimizer_step")
def _stale_shard(site: Site, step: Any, *args: Any, **kwargs: Any) -> Any:
    part = local_part(site.module.network.conv1.weight)
    before = part.detach().clone()
    output = step(*args, **kwargs)
    part.detach().copy_(before)
    return output


@mutation("one process has no weight decay", "ddp", MODULE, "configure_optimizers")
def _other_decay(site: Site, configure: Any) -> Any:
    configured = configure()
    for group in configured["optimizer"].param_groups:
        group["weight_decay"] = 0.0
    return configured


@mutation("one process has another learning rate", "ddp_spawn", RateScaling, "factor")
def _other_rate(site: Site, factor: Any, *args: Any) -> float:
    return float(factor(*args) * 2)


@mutation("one optimizer has a parameter of another network", "ddp", MODULE, "configure_optimizers")
def _stranger(site: Site, configure: Any) -> Any:
    configured = configure()
    parameters = configured["optimizer"].param_groups[0]["params"]
    parameters[-1] = nn.Parameter(parameters[-1].detach().clone())
    return configured


@mutation("one process's statistics stay", "ddp-sync")
def _unmoved_statistics(site: Site) -> None:
    site.replace(_Synchronised, "_track", lambda track, layer, *args: None)


@mutation("one process evaluates other weights", "ddp")
def _other_weights(site: Site) -> None:
    weight = site.module.network.fc.weight
    kept = weight.detach().clone()

    def swap() -> None:
        kept.copy_(weight.detach())
        _shift(weight[0], 10.0)

    site.at("on_validation_start", swap)
    site.at("on_validation_end", lambda: weight.data.copy_(kept))


@mutation("one process counts a batch twice in val/", "ddp", EvaluationMetrics, "update")
def _batch_twice(site: Site, update: Any, *args: Any) -> None:
    update(*args)
    update(*args)


@mutation("one process keeps old copies of other stages", "pp", STRATEGY, "_owned_tensors", args=PIPELINE)
def _stale_copies(site: Site, owned: Any, network: nn.Module) -> Any:
    for owner, tensor in owned(network):
        yield owner, tensor if owner == site.rank else tensor.detach().clone()
