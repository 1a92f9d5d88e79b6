"""State dicts of a network that is divided over processes: the whole from the parts, and the parts from the whole.

A checkpoint holds what one device would write: plain tensors on the CPU, optimizer states by the number of their
parameter. `torch.distributed.checkpoint.state_dict` has a structure of its own. Every process must call what gathers.
"""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_cifar.internals import tree_map_only


def whole_state(state: dict[Any, Any]) -> dict[Any, Any]:
    """A `state_dict()` with each tensor as a whole, plain one on the CPU."""

    def whole(tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()

    found: dict[Any, Any] = tree_map_only(Tensor, whole, state)
    return found


def divided_like(whole: Any, like: Tensor) -> Any:
    """Divide `whole` like `like`. What has another shape, such as a count of steps, is kept."""
    if not (isinstance(whole, Tensor) and isinstance(like, DTensor) and whole.shape == like.shape):
        return whole
    # Without a source rank each process cuts its part from its own, equal tensor.
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
