"""The messages of FSDP2 through memory that the processes of one machine's CPU share."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lit_cifar.strategies.shared_memory import SharedSlots, sum_in_order
from lit_cifar.strategies.tree_sum import all_gather

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.14


def send_through_shared_memory(network: nn.Module, group: dist.ProcessGroup) -> None:
    """Let all sharded modules of `network` gather parameters and reduce gradients in shared memory, not by gloo.

    With two processes the results are the same bits, with more the same up to rounding.
    """
    slots = SharedSlots(group)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(cast(Any, SharedAllGather(slots)))
            module.set_custom_reduce_scatter(cast(Any, SharedReduceScatter(slots)))


class _Message:
    def __init__(self, slots: SharedSlots) -> None:
        self._slots = slots

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for what is sent, and for what arrives."""
        return torch.empty(*size, dtype=dtype, device=device)


class SharedAllGather(_Message):
    """For `set_custom_all_gather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor`, (n * processes,), with the `input_tensor`, (n,), of each process."""
        inputs = self._slots.exchange(input_tensor)
        if inputs is None:
            all_gather(output_tensor, input_tensor, group=group)
        else:
            torch.cat(inputs, out=output_tensor)


class SharedReduceScatter(_Message):
    """For `set_custom_reduce_scatter`; sums are taken in the order of the ranks."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor`, (n,), with this process's part of the sum or mean of `input_tensor`."""
        inputs = self._slots.exchange(input_tensor)
        if inputs is None:
            _reduce_scatter(output_tensor, input_tensor, group=group, op=op)
            return
        sum_in_order([each.view(len(inputs), -1)[dist.get_rank(group)] for each in inputs], out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor *= 1 / len(inputs)
