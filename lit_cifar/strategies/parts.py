"""The parts of a batch, which pass one by one; their gradients and running statistics are summed in a tree.

Part v of V has the positions v, v + V, ... of a global batch. Process r of R reads the positions r, r + R, ... and so
holds the parts r, r + R, ..., which are a subtree.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lit_cifar.data.images import Batch
from lit_cifar.strategies.tree_sum import TreeSum, in_tree_order, tree_all_reduce

BUCKET_BYTES = 25 << 20  # DistributedDataParallel's
Microbatches = tuple[Tensor, Tensor, list[int], list[float]]  # images, targets; size and weight of each microbatch


class WholeBatch:
    """A batch that is not divided into parts: stands in for `Parts` without `--virtual_replicas`."""

    one_by_one = False  # whether parts pass one by one, and their gradients are taken from the parameters and averaged

    def num_microbatches(self, asked: int) -> int:
        """Number of microbatches into which a pipeline cuts its batch if `asked` for so many."""
        return asked

    def microbatches(self, batch: Batch, count: int) -> Microbatches:
        """The microbatches of `batch`. A weight is the factor of a microbatch's `reduced` loss."""
        sizes = [len(labels) for labels in batch.labels.tensor_split(count)]
        return batch.images, batch.targets, sizes, [batch.weight] * len(sizes)

    def reduced(self, losses: Tensor, batch_size: int) -> Tensor:
        """The share of a microbatch in the mean loss of a batch, from the loss of each of its samples, (n,)."""
        return losses.sum() / batch_size

    def place(self, number: int) -> int:
        """The place in the batch of the part, or microbatch, that passes after `number` others."""
        return number

    def begin(self, buffers: Iterable[Tensor]) -> None:
        """Begin a step, from the values of `buffers`."""

    def own_statistics(self, buffers: Iterable[Tensor] | None = None) -> AbstractContextManager[None]:
        """Return a context for the forward of a part, which moves `buffers`."""
        return nullcontext()


class Parts(WholeBatch):
    """The parts that one process has, and the sums over them.

    V = `num_parts`, a power of two, are divided over the R = `num_processes` that read different samples. The processes
    that hold the same parameters are the `group`, None for all.
    """

    one_by_one = True

    def __init__(self, num_parts: int, *, num_processes: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.num_parts = num_parts
        self.count = num_parts // num_processes  # number of this process's parts
        self.places = in_tree_order(self.count)  # the number of the part that passes first, second and so on
        self._group, self._is_alone = group, num_processes == 1
        self._gradients: dict[Tensor, TreeSum] = {}  # sums by parameter
        self._handles: list[RemovableHandle] = []
        self._before: dict[Tensor, Tensor] = {}
        self._statistics: dict[Tensor, TreeSum] = {}

    def cut(self, batch: Batch) -> list[Batch]:
        """This process's parts in the order of the tree, each weighted by its share of the samples."""
        average = len(batch.labels) / batch.weight  # samples of a process

        def part(place: int) -> Batch:
            own = slice(place, None, self.count)
            labels, soft_targets = batch.labels[own], None if batch.soft_targets is None else batch.soft_targets[own]
            return Batch(batch.images[own], labels, batch.ids[own], len(labels) * self.count / average, soft_targets)

        return [part(place) for place in self.places]

    @override
    def num_microbatches(self, asked: int) -> int:
        return self.count

    @override
    def microbatches(self, batch: Batch, count: int) -> Microbatches:
        parts = self.cut(batch)
        images, targets = torch.cat([part.images for part in parts]), torch.cat([part.targets for part in parts])
        return images, targets, [len(part.labels) for part in parts], [part.weight for part in parts]

    @override
    def reduced(self, losses: Tensor, batch_size: int) -> Tensor:
        return losses.mean()

    @override
    def place(self, number: int) -> int:
        return self.places[number]

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take every gradient as soon as it is there, until `unwatch`."""
        self._gradients = {parameter: TreeSum() for parameter in parameters if parameter.requires_grad}
        self._handles = [p.register_post_accumulate_grad_hook(self._take) for p in self._gradients]  # type: ignore[no-untyped-call]

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._gradients, self._handles = {}, []

    def _take(self, parameter: Tensor) -> None:
        if parameter.grad is not None:  # a pipeline has no gradients for Lightning's backward
            self._gradients[parameter].push(parameter.grad)
            parameter.grad = None

    # A step: `begin`, then every part, then `average`.

    @override
    def begin(self, buffers: Iterable[Tensor]) -> None:
        """Forget the step before, and remember from which buffers the parts start."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = None  # Lightning forgets it only after the first parts
            gradient.clear()  # a run that is resumed may have filled it before its first step
        self._before = {buffer: buffer.clone() for buffer in buffers}
        self._statistics = {buffer: TreeSum() for buffer in self._before}

    @override
    @contextmanager
    def own_statistics(self, buffers: Iterable[Tensor] | None = None) -> Iterator[None]:
        """Return a context for the forward of a part, which updates `buffers` (all by default) from before the step."""
        own = list(self._before if buffers is None else buffers)
        for buffer in own:
            # With `copy_` alone autograd would believe that a part whose backward is still to come has lost its input.
            buffer.data.copy_(self._before[buffer])
        yield
        for buffer in own:
            self._statistics[buffer].push(buffer.clone())

    def average(self) -> None:
        """Give parameters and buffers the mean over all parts of all processes."""
        moved = {buffer: total for buffer, total in self._statistics.items() if buffer.is_floating_point()}
        sums = self._summed({key: total for key, total in self._gradients.items() if total.count} | moved)
        scale = 1 / self.num_parts  # a power of two: nothing is rounded
        for tensor, total in sums.items():
            if tensor in moved:
                tensor.copy_(total * scale)
            else:
                tensor.grad = total * scale

    def _summed(self, parts: dict[Tensor, TreeSum]) -> dict[Tensor, Tensor]:
        """The sum over all processes for each key, exchanged bucket by bucket."""
        if self._is_alone:
            return {key: total.take() for key, total in parts.items()}
        sums: dict[Tensor, Tensor] = {}
        for bucket in _buckets(parts):
            flat = torch.cat([parts[key].take().flatten() for key in bucket])
            totals = torch.split(tree_all_reduce(flat, group=self._group), [key.numel() for key in bucket])
            sums |= {key: total.view(key.shape) for key, total in zip(bucket, totals, strict=True)}
        return sums


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divide `tensors`: neighbours of one device and dtype, up to `BUCKET_BYTES` or a single larger one, together."""
    found: list[list[Tensor]] = []
    for _, alike in groupby(tensors, key=lambda tensor: (tensor.device, tensor.dtype)):
        size = BUCKET_BYTES
        for tensor in alike:
            if size + tensor.nbytes > BUCKET_BYTES:
                found.append([])
                size = 0
            found[-1].append(tensor)
            size += tensor.nbytes
    return found
