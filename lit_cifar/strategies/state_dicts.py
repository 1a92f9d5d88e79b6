"""State dicts of a network that is divided over processes: the whole from the parts, and the parts from the whole.

A checkpoint holds what one device would write: plain tensors on the CPU, optimizer states by the number of their
parameter. `torch.distributed.checkpoint.state_dict` does the same in a structure of its own. Every process must call
what gathers.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lit_cifar.internals import tree_map_only
from lit_cifar.mode.tensors import local_part


def whole_state(state: dict[Any, Any]) -> dict[Any, Any]:
    """A `state_dict()` with each tensor as a whole, plain one on the CPU."""

    def whole(tensor: Tensor) -> Tensor:
        return (_gather(tensor) if isinstance(tensor, DTensor) else tensor).cpu()

    found: dict[Any, Any] = tree_map_only(Tensor, whole, state)
    return found


def _gather(tensor: DTensor) -> Tensor:
    """`tensor.full_tensor()`, axis by axis: for two axes at once torch warns that it cannot merge the communication."""
    placements = list(tensor.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def divided_like(whole: Any, like: Tensor) -> Any:
    """Divide `whole` like `like`. What has another shape, such as a count of steps, is kept."""
    if not (isinstance(whole, Tensor) and isinstance(like, DTensor) and whole.shape == like.shape):
        return whole
    part = torch.empty_like(like, dtype=whole.dtype, requires_grad=False)
    local_part(part).copy_(local_slice(whole, like))
    return part


def local_slice(whole: Tensor, like: DTensor) -> Tensor:
    """This process's part of `whole`, if that is split as `like` is."""
    mesh = like.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    # The last axis comes first: `fully_shard` divides what tensor parallelism left to this process.
    for placement, size, coordinate in reversed(list(zip(like.placements, mesh.shape, coordinates, strict=True))):
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]  # of Shard and _StridedShard
            chunks = whole.chunk(size, dim=dim)
            whole = chunks[coordinate] if coordinate < len(chunks) else whole.narrow(dim, 0, 0)
    return whole
