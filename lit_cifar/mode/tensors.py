"""Tensors that this process holds: its part of one that is divided over processes, and those that it trains."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, or a plain tensor itself; the memory is shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def squares(tensor: Tensor) -> Tensor:
    """The squares of its values, in float32 at least: in float16, 1e-4 has the square 0, and 256 an infinite one."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).square()
