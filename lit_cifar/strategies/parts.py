"""The parts of a batch, which pass one by one; their gradients and running statistics are summed in a tree.

Part v of V has the positions v, v + V, ... of a global batch. Process r of R reads the positions r, r + R, ... and so
holds the parts r, r + R, ..., which are a subtree.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from lit_cifar.data.images import Batch
from lit_cifar.strategies.part_sums import PartSums
from lit_cifar.strategies.tree_sum import TreeSum, in_tree_order


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
        self.places = in_tree_order(self.count)  # which of them passes first, second and so on
        self.group = group
        self._sums = PartSums(self.count, group=group, is_alone=num_processes == 1)
        self._before: dict[Tensor, Tensor] = {}
        self._statistics: dict[Tensor, TreeSum] = {}
        self._others: list[TreeSum] = []

    def cut(self, batch: Batch) -> list[Batch]:
        """This process's parts in the order of the tree; the weight of each is that of its samples among all."""
        average = len(batch.labels) / batch.weight  # samples of a process
        parts = (tuple(values[place :: self.count] for values in batch[:3]) for place in self.places)
        return [Batch(images, labels, ids, len(labels) * self.count / average) for images, labels, ids in parts]

    # A step: `begin`, then every part, then `average`.

    def begin(self, buffers: Iterable[Tensor]) -> None:
        """Forget the step before, and remember from which buffers the parts start."""
        self._sums.begin()
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
        moved = {buffer: total for buffer, total in self._statistics.items() if buffer.is_floating_point()}
        sums = self._sums.finish(moved)
        scale = 1 / self.num_parts  # a power of two: nothing is rounded
        for tensor, total in sums.items():
            if tensor in moved:
                tensor.copy_(total * scale)
            else:
                tensor.grad = total * scale

    # The gradients of single parts.

    def new_sum(self) -> TreeSum:
        """A sum that the caller fills, and that is cleared when a step begins."""
        self._others.append(TreeSum())
        return self._others[-1]

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on take every gradient as soon as it is there, until `unwatch`."""
        self._sums.watch(parameters)

    def unwatch(self) -> None:
        self._sums.unwatch()
