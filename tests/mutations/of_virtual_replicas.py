"""Mistakes that only a training with virtual replicas can make.

Most change nothing but the order in which numbers are added: the last bits of the result, which a tolerance allows.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_cifar.data.images import Batch
from lit_cifar.strategies import parts, tree_sum
from lit_cifar.strategies.parts import TreeReduceScatter, VirtualParts
from lit_cifar.strategies.tree_sum import TreeSum, tree_reduce_scatter
from lit_cifar.task.metrics import MeanLoss
from tests.mutations.planting import Mutation, Site, planted

MUTATIONS: list[Mutation] = []
mutation = partial(planted, MUTATIONS)


@mutation("gradients are added one after the other", "dp", TreeSum, "push")
def _order_of_arrival(site: Site, in_tree: Any, total: TreeSum, value: Tensor) -> None:
    before = total._sums[0][1] if total._sums else torch.zeros_like(value)
    total._sums = [(total.count + 1, before + value)]


@mutation("processes are added by their ranks", "ddp", devices=4)
def _order_of_ranks(site: Site) -> None:
    site.replace(tree_sum, "in_tree_order", lambda in_tree_order, count: range(count))


@mutation("each process keeps the sum of its own parts", "ddp")
def _no_exchange(site: Site) -> None:
    site.replace(parts, "tree_all_reduce", lambda tree_all_reduce, flat, group: flat)


@mutation("each part is summed over the processes", "fsdp2", TreeReduceScatter, "__call__")
def _exchange_of_every_part(
    site: Site, sums: Any, own: TreeReduceScatter, *, output_tensor: Tensor, input_tensor: Tensor, group: Any, **_: Any
) -> None:
    output_tensor.zero_()
    own._total.push(tree_reduce_scatter(input_tensor, group=group))
    if own._total.count == own._parts.count:
        torch.mul(own._total.take(), 1 / own._parts.num_parts, out=output_tensor)


@mutation("there are as many parts as processes", "ddp", VirtualParts, "__init__")
def _part_for_each_process(
    site: Site, init: Any, own: VirtualParts, num_parts: int, *, num_processes: int, **kwargs: Any
) -> None:
    init(own, num_processes, num_processes=num_processes, **kwargs)


@mutation("parts are consecutive samples of a process", "ddp", VirtualParts, "cut")
def _consecutive_samples(site: Site, cut: Any, own: VirtualParts, batch: Batch) -> list[Batch]:
    order = torch.empty(len(batch.labels), dtype=torch.int64)
    for place, samples in enumerate(torch.arange(len(order)).tensor_split(own.count)):
        order[place :: own.count] = samples
    batches: list[Batch] = cut(own, Batch(batch.images[order], batch.labels[order], batch.ids[order], batch.weight))
    return batches


@mutation("unequal parts of a ragged batch have equal weight", "ddp")
def _equal_weights(site: Site) -> None:
    site.replace(VirtualParts, "cut", lambda cut, own, batch: [part._replace(weight=1.0) for part in cut(own, batch)])


@mutation("running statistics are the last part's", "ddp", VirtualParts, "average")
def _statistics_of_last_part(site: Site, average: Any, own: VirtualParts) -> None:
    last = {buffer: buffer.clone() for buffer in own._statistics}
    average(own)
    for buffer, value in last.items():
        buffer.copy_(value)


@mutation("each part continues the running statistics", "mp", VirtualParts, "own_statistics")
def _chained_statistics(site: Site, statistics: Any, own: VirtualParts, *args: Any) -> Any:
    own._before = {buffer: buffer.clone() for buffer in own._before}
    return statistics(own, *args)


@mutation("logged losses are added in float32", "ddp")
def _losses_in_float(site: Site) -> None:
    def add(metric: MeanLoss, update: Any, losses: Tensor) -> None:
        before = metric.total.clone()
        update(losses)
        metric.total.copy_(before + losses.sum() * 2.0**32)

    for metric in site.module.modules():
        if isinstance(metric, MeanLoss):
            site.replace(metric, "update", partial(add, metric))
