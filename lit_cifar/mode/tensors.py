"""Tensors that this process holds: its part of one that is divided over processes, and those that it trains."""

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, or a plain tensor itself; the memory is shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
