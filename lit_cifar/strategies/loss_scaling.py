"""`16-mixed` where no process sees all gradients: one scale, and one decision whether a step is skipped, for all.

float16 has few exponents, so the loss is scaled before backward and the gradients are scaled back after it; a step with
gradients that have overflowed is left out, and the scale lowered (Micikevicius et al. 2018,
https://arxiv.org/abs/1710.03740). Where gradients are averaged over the processes all find the same. Where they are
divided over them, by parameter or by part, they have to ask.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


class AgreedGradScaler(GradScaler):
    """torch's gradient scaler, for which a gradient has overflowed in all processes if it has in any."""

    def _unscale_grads_(self, optimizer: Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, *args)
        for has_overflowed in found.values():
            dist.all_reduce(has_overflowed, op=dist.ReduceOp.MAX)
        return found


def agree_on_overflow(precision: Precision) -> None:
    """Put such a scaler in the place of the precision's own, if it has one; with the same settings."""
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        agreed = AgreedGradScaler(device=precision.device)
        agreed.load_state_dict(precision.scaler.state_dict())
        precision.scaler = agreed


def loss_scale(precision: Precision, device: torch.device) -> Tensor | float:
    """By what `precision` will multiply a loss on `device` before backward."""
    if not isinstance(precision, MixedPrecision) or precision.scaler is None:
        return 1.0
    scale: Tensor = precision.scaler.scale(torch.ones((), device=device))
    return scale
