"""Order of images, activations and weights in memory: channel by channel, torch's own, or pixel by pixel.

The tensor cores of GPUs take convolutions in torch.channels_last, also called NHWC. It changes no value.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar.internals import tree_map_only


class Plain(nn.Module):
    """The identity, whose output and gradient lie in memory in torch's own order."""

    def forward(self, input: Tensor) -> Tensor:
        return with_plain_gradient(input.contiguous()).clone()  # the next layer may change it in place


def with_plain_gradient(tensor: Tensor) -> Tensor:
    """Return `tensor`, whose gradient will lie in memory in torch's own order."""
    output: Tensor = _PlainGradient.apply(tensor)
    return output


class _PlainGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def plain(content: Any) -> Any:
    """Copy `content`, dicts and lists that hold tensors, with the tensors in torch's own order."""
    return tree_map_only(Tensor, Tensor.contiguous, content)


def follow_parameters(optimizer: Optimizer) -> None:
    """Let an optimizer's state lie where its parameters are, and in their order, as fused kernels want it.

    A checkpoint has it in torch's own order, and Lightning moves it to one device. "step" stays where it is.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if isinstance(parameter, Tensor) else ():  # it may hold more, by names
            if name == "step" or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if (value.device, value.stride()) != (parameter.device, parameter.stride()):
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
