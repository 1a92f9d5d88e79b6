"""`16-mixed` if no process has all gradients: all processes use the same scale and skip the same steps.

float16 has few exponents, so the loss is scaled before backward and the gradients are unscaled after it. A step whose
gradients have overflowed is skipped, and the scale is lowered (Micikevicius et al. 2018,
https://arxiv.org/abs/1710.03740). If gradients are averaged over the processes, all find the same overflows. If
gradients are divided over the processes, by parameter or by part, they have to agree.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


class AgreedGradScaler(GradScaler):
    """A gradient scaler for which a gradient has overflowed in all processes if it has in any."""

    def _unscale_grads_(self, optimizer: Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, *args)
        for has_overflowed in found.values():
            dist.all_reduce(has_overflowed, op=dist.ReduceOp.MAX)
        return found


def agree_on_overflow(precision: Precision) -> None:
    """Replace the scaler of `precision`, if it has one, by an `AgreedGradScaler` with the same settings."""
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        agreed = AgreedGradScaler(device=precision.device)
        agreed.load_state_dict(precision.scaler.state_dict())
        precision.scaler = agreed


def loss_scale(precision: Precision, device: torch.device) -> Tensor | float:
    """The factor by which `precision` will multiply a loss on `device` before backward."""
    if not isinstance(precision, MixedPrecision) or precision.scaler is None:
        return 1.0
    scale: Tensor = precision.scaler.scale(torch.ones((), device=device))
    return scale
