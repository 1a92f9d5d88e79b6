"""The parts of a batch, which pass one by one; their gradients and running statistics are summed in a tree.

Part v of V has the positions v, v + V, ... of a global batch. Process r of R reads the positions r, r + R, ... and so
holds the parts r, r + R, ..., which are a subtree.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lit_cifar.data.images import Batch
from lit_cifar.strategies.same_bits.tree_sum import TreeAllReduce, TreeSum, in_tree_order

Microbatches = tuple[Tensor, Tensor, list[int], list[float]]  # images, labels, the size of each, its factor of the loss


class WholeBatch:
    """What strategies ask of `Parts`, without `--virtual_replicas`."""

    one_by_one = False  # whether parts pass one by one, whose gradients are taken from the parameters and averaged

    def num_microbatches(self, asked: int) -> int:
        """Into how many microbatches a pipeline cuts its batch if `asked` for so many."""
        return asked

    def microbatches(self, batch: Batch, count: int) -> Microbatches:
        """Of `batch`, one after the other. The factor is that of the `reduced` loss."""
        sizes = [len(labels) for labels in batch.labels.tensor_split(count)]
        return batch.images, batch.labels, sizes, [batch.weight / len(batch.labels)] * len(sizes)

    def reduced(self, losses: Tensor) -> Tensor:
        """The loss of a microbatch, from that of each sample, (n,)."""
        return losses.sum()

    def place(self, number: int) -> int:
        """The place in the batch of the part, or microbatch, that passes after `number` others."""
        return number

    def begin(self, buffers: Iterable[Tensor]) -> None:
        """A step begins, from `buffers`."""

    def own_statistics(self, buffers: Iterable[Tensor] | None = None) -> AbstractContextManager[None]:
        """Around the forward of a part, which moves `buffers`."""
        return nullcontext()


class Parts(WholeBatch):
    """The parts that one process has, and the sums over them.

    There are V `num_parts`, a power of two, over the R `num_processes` that read different samples. Those of them that
    hold the same parameters are the `group`, None for all.
    """

    one_by_one = True

    def __init__(self, num_parts: int, *, num_processes: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.num_parts = num_parts
        self.count = num_parts // num_processes  # those of this process
        self.places = in_tree_order(self.count)  # which of them passes first, second and so on
        self.sums = PartSums(self.count, group=group, is_alone=num_processes == 1)
        self._before: dict[Tensor, Tensor] = {}
        self._statistics: dict[Tensor, TreeSum] = {}
        self._others: list[TreeSum] = []

    def cut(self, batch: Batch) -> list[Batch]:
        """This process's parts in the order of the tree; the weight of each is that of its samples among all."""
        average = len(batch.labels) / batch.weight  # samples of a process
        parts = (tuple(values[place :: self.count] for values in batch[:3]) for place in self.places)
        return [Batch(images, labels, ids, len(labels) * self.count / average) for images, labels, ids in parts]

    @override
    def num_microbatches(self, asked: int) -> int:
        return self.count

    @override
    def microbatches(self, batch: Batch, count: int) -> Microbatches:
        parts = self.cut(batch)
        images, labels = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
        return images, labels, [len(part.labels) for part in parts], [part.weight for part in parts]

    @override
    def reduced(self, losses: Tensor) -> Tensor:
        return losses.mean()

    @override
    def place(self, number: int) -> int:
        return self.places[number]

    # A step: `begin`, then every part, then `average`.

    @override
    def begin(self, buffers: Iterable[Tensor]) -> None:
        """Forget the step before, and remember from which buffers the parts start."""
        self.sums.begin()
        for total in self._others:
            total.clear()
        self._before = {buffer: buffer.clone() for buffer in buffers}
        self._statistics = {buffer: TreeSum() for buffer in self._before}

    @override
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
        sums = self.sums.finish(moved)
        scale = 1 / self.num_parts  # a power of two: nothing is rounded
        for tensor, total in sums.items():
            if tensor in moved:
                tensor.copy_(total * scale)
            else:
                tensor.grad = total * scale

    def new_sum(self) -> TreeSum:
        """A sum that the caller fills, and that is cleared when a step begins."""
        self._others.append(TreeSum())
        return self._others[-1]


BUCKET_BYTES = 25 << 20  # DistributedDataParallel's


class PartSums:
    """Sums over all parts, in the order of the tree.

    Gradients are exchanged bucket by bucket during the backward of a process's last part: those of the last layers
    travel while those of the first are computed. Which parameters get a gradient in this process is known after one
    step, so the first step exchanges all at its end. If the process `is_alone`, it has all parts.
    """

    def __init__(self, num_parts: int, *, group: dist.ProcessGroup | None, is_alone: bool) -> None:
        self._num_parts, self._group, self._is_alone = num_parts, group, is_alone
        self._gradients: dict[Tensor, TreeSum] = {}  # by parameter
        self._handles: list[RemovableHandle] = []
        self._buckets: list[list[Tensor]] = []
        self._waiting: list[list[Tensor]] = []  # buckets of this step that are not full yet
        self._exchanges: list[tuple[list[Tensor], TreeAllReduce]] = []
        self._lock: AbstractContextManager[Any] = nullcontext()  # a lock cannot be sent to spawned processes

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on take every gradient as soon as it is there, until `unwatch`."""
        self._lock = Lock()  # each GPU of a process has a thread of its own for backward
        self._gradients = {parameter: TreeSum() for parameter in parameters if parameter.requires_grad}
        self._handles = [p.register_post_accumulate_grad_hook(self._take) for p in self._gradients]  # type: ignore[no-untyped-call]

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._gradients, self._handles, self._buckets = {}, [], []

    def begin(self) -> None:
        """Forget the step before."""
        for parameter, total in self._gradients.items():
            parameter.grad = None  # Lightning forgets it only after the first parts
            total.clear()  # of what a run that is resumed does before its first step
        self._waiting, self._exchanges = [*self._buckets], []

    def finish(self, others: Mapping[Tensor, TreeSum]) -> dict[Tensor, Tensor]:
        """The sum for each parameter that got a gradient, and for each key of `others`."""
        self._waiting = []
        late = {key: total for key, total in reversed(self._gradients.items()) if total.count}
        rest: dict[Tensor, TreeSum] = {**late, **others}
        if self._is_alone:
            return {key: total.take() for key, total in rest.items()}
        for bucket in _buckets(rest):
            self._start(bucket, rest)
        for _, exchange in self._exchanges:
            exchange.add()
        sums: dict[Tensor, Tensor] = {}
        for bucket, exchange in self._exchanges:
            totals = torch.split(exchange.take(), [key.numel() for key in bucket])
            sums |= {key: total.view(key.shape) for key, total in zip(bucket, totals, strict=True)}
        self._exchanges = []  # frees what was sent and received, before the optimizer steps
        if late:
            self._buckets = _buckets(key for key in reversed(self._gradients) if key in sums)
        return sums

    def _take(self, parameter: Tensor) -> None:
        if parameter.grad is None:  # a pipeline hands over nothing in the backward of Lightning
            return
        self._gradients[parameter].push(parameter.grad)
        parameter.grad = None
        with self._lock:
            while self._waiting and self._is_full(self._waiting[0]):  # all processes start buckets in the same order
                self._start(self._waiting.pop(0), self._gradients)

    def _is_full(self, bucket: list[Tensor]) -> bool:
        # The last one comes last, so that nearly every bucket that is not full is seen at once.
        return all(self._gradients[key].count == self._num_parts for key in reversed(bucket))

    def _start(self, bucket: list[Tensor], totals: Mapping[Tensor, TreeSum]) -> None:
        flat = torch.cat([totals[key].take().flatten() for key in bucket])
        self._exchanges.append((bucket, TreeAllReduce(flat, group=self._group)))


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """In their order, neighbours of one device and dtype together, up to `BUCKET_BYTES` or a single larger one."""
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
