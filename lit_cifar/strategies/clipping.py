"""Clipping by the norm of the gradient, whose squares are added in one order however the parameters are divided."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_cifar.strategies.mesh import local_part
from lit_cifar.strategies.state_dicts import local_slice


@torch.no_grad()
def clip_in_order(optimizer: Optimizer, clip_val: float, *, group: dist.ProcessGroup | None = None) -> None:
    """`torch.nn.utils.clip_grad_norm_` for all parameters of `optimizer`.

    `group` are the processes that together have each row of each gradient once; None if this one has all. A row is what
    an index of the first dim selects. No mode divides a row.
    """
    parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
    device = next(p.device for p in parameters if p.grad is not None)
    squares = torch.cat([_squares(parameter).to(device) for parameter in parameters])
    if group is not None:
        dist.all_reduce(squares, group=group)  # zeros from all processes but one
    scale = (clip_val / (_pairwise_sum(squares).sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local_part(parameter.grad).mul_(scale.to(parameter.grad.device))


def _squares(parameter: Tensor) -> Tensor:
    """The sum of the squares of each row of its gradient, (rows,); 0 for rows that this process does not have."""
    squares = torch.zeros(parameter.shape[0] if parameter.dim() else 1, dtype=parameter.dtype, device=parameter.device)
    if parameter.grad is not None:
        own = local_slice(squares, parameter.grad) if isinstance(parameter.grad, DTensor) else squares
        own.copy_(squares_of_rows(local_part(parameter.grad)))
    return squares


def squares_of_rows(gradient: Tensor) -> Tensor:
    """The sum of the squares of each row of `gradient`, (rows, ...): (rows,)."""
    return _pairwise_sum((gradient.flatten(1) if gradient.dim() > 1 else gradient.view(-1, 1)).square())


def _pairwise_sum(values: Tensor) -> Tensor:
    """The sums over the last dim of `values`, (..., n), by adding the second half to the first; overwrites `values`.

    These are additions of single elements, which have the same result in any kernel, shape and device.
    """
    while (width := values.shape[-1]) > 1:
        half = (width + 1) // 2
        values[..., : width - half] += values[..., half:]
        values = values[..., :half]
    return values[..., 0]
