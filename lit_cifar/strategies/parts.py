"""The parts of a batch, which pass one by one; their gradients and running statistics are summed in a tree.

Part v of V has the positions v, v + V, ... of a global batch. Process r of R holds parts r, r + R, ..., a subtree.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lit_cifar.data.images import Batch
from lit_cifar.strategies.tree_sum import TreeSum, in_tree_order, tree_all_reduce, tree_reduce_scatter

Microbatches = tuple[Tensor, Tensor, list[int], list[float]]  # see `EqualMicrobatches.microbatches_of`


class VirtualParts:
    """The parts of a batch that one process has, one for each virtual replica, and the sums over them.

    V = `num_parts`, a power of two, are divided over the R = `num_processes` that read different samples. The processes
    that hold the same parameters are the `group`, None for all.
    """

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

    # As microbatches of a pipeline, see `EqualMicrobatches`.

    def microbatches_of(self, batch: Batch) -> Microbatches:
        parts = self.cut(batch)
        images, targets = torch.cat([part.images for part in parts]), torch.cat([part.targets for part in parts])
        return images, targets, [len(part.labels) for part in parts], [part.weight for part in parts]

    def share_of_loss(self, losses: Tensor, batch_size: int) -> Tensor:
        return losses.mean()

    def outputs_for_module(self, logits: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        return torch.split(logits, sizes)

    def number_in_batch(self, microbatch: int) -> int:
        return self.places[microbatch]

    def take_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take every gradient as soon as it is there, until `leave_gradients`."""
        self._gradients = {parameter: TreeSum() for parameter in parameters if parameter.requires_grad}
        self._handles = [p.register_post_accumulate_grad_hook(self._take) for p in self._gradients]  # type: ignore[no-untyped-call]

    def leave_gradients(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._gradients, self._handles = {}, []

    def _take(self, parameter: Tensor) -> None:
        if parameter.grad is not None:  # a pipeline has no gradients for Lightning's backward
            self._gradients[parameter].push(parameter.grad)
            parameter.grad = None

    # A step: `start_step`, then every part, then `average`.

    def start_step(self, buffers: Iterable[Tensor]) -> None:
        """Forget the step before, and remember from which buffers the parts start."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = None  # Lightning forgets it only after the first parts
            gradient.clear()  # a run that is resumed may have filled it before its first step
        self._before = {buffer: buffer.clone() for buffer in buffers}
        self._statistics = {buffer: TreeSum() for buffer in self._before}

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
        """The sum over all processes for each key: neighbours of one device and dtype are sent together."""
        sums = {key: total.take() for key, total in parts.items()}
        if self._is_alone:
            return sums
        for _, alike in groupby(parts, key=lambda tensor: (tensor.device, tensor.dtype)):
            keys = [*alike]
            flat = tree_all_reduce(torch.cat([sums[key].flatten() for key in keys]), group=self._group)
            totals = torch.split(flat, [key.numel() for key in keys])
            sums |= {key: total.view(key.shape) for key, total in zip(keys, totals, strict=True)}
        return sums


class TreeReduceScatter:
    """Reduce-scatter for `set_custom_reduce_scatter`: the mean over all parts, summed in the order of the tree.

    Gradients of all parts but the last are kept, and zeros returned, which Lightning discards before the last backward.
    """

    def __init__(self, parts: VirtualParts) -> None:
        self._parts = parts
        self._total = TreeSum()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **kwargs: Any) -> None:
        """Fill `output_tensor`, (n,), from `input_tensor`, (n * processes,)."""
        if input_tensor.is_cuda:  # the tensor is made on one stream and added on another
            input_tensor.record_stream(torch.cuda.current_stream())
        self._total.push(input_tensor)
        if self._total.count < self._parts.count:
            output_tensor.zero_()
            return
        total = tree_reduce_scatter(self._total.take(), group=group)
        torch.mul(total, 1 / self._parts.num_parts, out=output_tensor)


def reduce_in_tree(network: nn.Module, parts: VirtualParts) -> None:
    """Let each sharded module of `network` reduce its gradients by a `TreeReduceScatter`, which also divides them."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(cast(Any, TreeReduceScatter(parts)))
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
