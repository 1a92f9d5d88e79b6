"""Gives Lightning gradients that are known before it asks for them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class HandOver(torch.autograd.Function):
    """A loss whose gradients are known already: backward returns them, times the gradient of the loss.

    Lightning runs training_step, zero_grad, backward, in this order; a pipeline's schedule runs backward within the
    step. So its gradients are set aside, times the `scale` by which a gradient scaler will multiply the loss, and
    handed over to the parameters when Lightning asks for them.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], scale: Tensor | float, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.gradients, ctx.scale = gradients, scale
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        factor = grad / ctx.scale
        return None, None, None, *(None if gradient is None else gradient * factor for gradient in ctx.gradients)
