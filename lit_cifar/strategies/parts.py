"""The parts of a batch, which pass one by one; their gradients and running statistics are summed in a tree.

Part v of V has the positions v, v + V, ... of a global batch. Process r of R reads the positions r, r + R, ... and so
holds the parts r, r + R, ..., which are a subtree.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lit_cifar.data.images import Batch
from lit_cifar.strategies.tree_sum import TreeSum, in_tree_order, tree_all_reduce


class Parts:
    """The parts that one process has, and the sums over them.

    Args:
        num_parts: V, a power of two, over all processes.
        num_processes: R, those that read different samples.
        group: The processes that hold the same parameters and read different samples; None for all.
    """

    def __init__(self, num_parts: int, *, num_processes: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.num_parts = num_parts
        self.count = num_parts // num_processes  # those of this process
        self.group = group
        self._gradients: dict[nn.Parameter, TreeSum] = {}
        self._before: dict[Tensor, Tensor] = {}
        self._statistics: dict[Tensor, TreeSum] = {}
        self._handles: list[RemovableHandle] = []
        self._others: list[TreeSum] = []

    def cut(self, batch: Batch) -> list[Batch]:
        """This process's parts in the order of the tree; the weight of each is that of its samples among all."""
        average = len(batch.labels) / batch.weight  # samples of a process
        parts = (tuple(values[place :: self.count] for values in batch[:3]) for place in in_tree_order(self.count))
        return [Batch(images, labels, ids, len(labels) * self.count / average) for images, labels, ids in parts]

    # A step: `begin`, then every part, then `average`.

    def begin(self, buffers: Iterable[Tensor]) -> None:
        """Forget the step before, and remember from which buffers the parts start."""
        for parameter, total in self._gradients.items():
            parameter.grad = None  # Lightning forgets it only after the first parts
            total.clear()  # of what a run that is resumed does before its first step
        for total in self._others:
            total.clear()
        self._before = {buffer: buffer.clone() for buffer in buffers}
        self._statistics = {buffer: TreeSum() for buffer in self._before}

    @contextmanager
    def own_statistics(self, buffers: Iterable[Tensor] | None = None) -> Iterator[None]:
        """Around the forward of a part, which updates `buffers` (by default all) from their values before the step."""
        own = list(self._before if buffers is None else buffers)
        for buffer in own:
            # Not `copy_` alone: autograd would believe that a part whose backward is still to come has lost its input.
            buffer.data.copy_(self._before[buffer])
        yield
        for buffer in own:
            self._statistics[buffer].push(buffer.clone())

    def average(self) -> None:
        """Give parameters and buffers the mean over all parts of all processes."""
        trained = {parameter: total for parameter, total in self._gradients.items() if total.count}
        moved = {buffer: total for buffer, total in self._statistics.items() if buffer.is_floating_point()}
        means = iter(self._means([total.take() for total in (*trained.values(), *moved.values())]))
        for parameter in trained:
            parameter.grad = next(means)
        for buffer in moved:
            buffer.copy_(next(means))

    def _means(self, totals: list[Tensor]) -> list[Tensor]:
        """The means over all parts, from the sums over those of this process."""
        scale = 1 / self.num_parts  # a power of two: nothing is rounded
        if self.count == self.num_parts:
            return [total * scale for total in totals]
        means = dict.fromkeys(range(len(totals)), torch.empty(0))
        for device in {total.device: None for total in totals}:
            own = {place: total for place, total in enumerate(totals) if total.device == device}
            flat = tree_all_reduce(torch.cat([total.flatten() for total in own.values()]), group=self.group) * scale
            parts = torch.split(flat, [total.numel() for total in own.values()])
            means |= {place: part.view_as(own[place]) for place, part in zip(own, parts, strict=True)}
        return list(means.values())

    # The gradients of single parts.

    def new_sum(self) -> TreeSum:
        """A sum that the caller fills, and that is cleared when a step begins."""
        self._others.append(TreeSum())
        return self._others[-1]

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on take every gradient as soon as it is there, until `unwatch`."""
        self._gradients = {parameter: TreeSum() for parameter in parameters if parameter.requires_grad}
        self._handles = [p.register_post_accumulate_grad_hook(self._take) for p in self._gradients]  # type: ignore[no-untyped-call]

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._gradients, self._handles = {}, []

    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:  # a pipeline hands over nothing in the backward of Lightning
            self._gradients[parameter].push(parameter.grad)
            parameter.grad = None
