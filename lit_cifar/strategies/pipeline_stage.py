"""A stage of a pipeline as torch's schedules run it, and what stages return."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.func import functional_call

from lit_cifar.models.partition import Partition
from lit_cifar.reporting.timeline import Kind
from lit_cifar.strategies.parts import Parts
from lit_cifar.strategies.random_streams import begin_part, begin_stage

Span = Callable[[Kind, int, int], AbstractContextManager[None]]  # of a stage's work on a microbatch


class Stage(PipelineStage):
    """A stage that greets other processes only, and works within a `span`. Each of `parts` has its own statistics."""

    def __init__(self, *args: Any, span: Span, parts: Parts | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._span = span
        self._parts = parts

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's, recorded."""
        own = nullcontext() if self._parts is None else self._parts.own_statistics(self.submod.buffers())
        begin_part(fwd_chunk_id if self._parts is None else self._parts.places[fwd_chunk_id])
        begin_stage(self.stage_index)
        with self._span("forward", self.stage_index, fwd_chunk_id), own:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """As torch's, recorded."""
        with self._span("backward" if full_backward else "backward_input", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """As torch's, recorded."""
        with self._span("backward_weight", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    # In torch 2.11 the first step exchanges a message between neighbouring stages, also where a V has both on one
    # process; gloo cannot send to itself.
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        torchs: Any = super()  # torch 2.15 has it no more
        operations: list[dist.P2POp] = torchs._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]


def output_dtypes(
    network: nn.Module, partition: Partition, dtype: torch.dtype, *, device: torch.device
) -> list[torch.dtype]:
    """What each stage of `network` returns for images of `dtype`, here and now; found without computing anything."""
    modules = partition.modules(network)
    states = [module.state_dict() for module in modules]
    found = []
    with FakeTensorMode():
        x = torch.empty(2, *partition.image_shape, dtype=dtype, device=device)
        for module, state in zip(modules, states, strict=True):
            unreal = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in state.items()}
            x = functional_call(module, unreal, (x,))
            found.append(x.dtype)
    return found
