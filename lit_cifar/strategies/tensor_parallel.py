"""How the blocks of a ResNet are split as tensors: Megatron's way with an MLP, for two convolutions.

Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053), section 3: the first layer is cut by output channel, so that
what follows it channel by channel, here BatchNorm and ReLU, needs nobody else; the second by input channel, so that
every process computes a summand of the block's output, and one all-reduce adds them up. Backward mirrors this, with
one all-reduce of the gradient of the first layer's input. Stem, second BatchNorm and shortcut are computed by every
process; the classifier is split by torch's own `RowwiseParallel`.

Each parameter and buffer becomes a DTensor. The layers compute with its local part.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torchvision.models.resnet import BasicBlock, ResNet

from lit_cifar.models.memory_format import with_plain_gradient

# The channels of every BasicBlock of torchvision's ResNets are multiples of it.
NUM_CHANNELS = 64


def split_tensors(network: ResNet, mesh: DeviceMesh) -> None:
    """Leave this process its part of every parameter and buffer, in place; nothing is sent.

    Args:
        network: The same in all processes, on their devices.
        mesh: One axis, whose size divides the channels of every block.
    """
    placed = placements(network)
    for name, layer in network.named_modules():
        _distribute(layer, {key: placed[f"{name}.{key}"] for key in _own_tensors(layer)}, mesh)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.modules.batchnorm._BatchNorm):
            _derive(layer, _ComputesLocally)
    for block in network.modules():
        if isinstance(block, BasicBlock):
            for layer, kind in ((block.conv1, _ByOutputChannel), (block.conv2, _ByInputChannel)):
                _derive(layer, kind)
                layer.group = mesh.get_group()
    parallelize_module(network.fc, mesh, RowwiseParallel(input_layouts=Replicate()))
    # It returns a view, on which the hooks of `fully_shard` could be lost.
    network.fc.register_forward_hook(lambda layer, inputs, output: output.clone())


def placements(network: ResNet) -> dict[str, Placement]:
    """Along which dim each parameter and buffer is split, by name."""
    placed: dict[str, Placement] = {name: Replicate() for name in network.state_dict()}
    placed["fc.weight"] = Shard(1)
    for name, block in network.named_modules():
        if isinstance(block, BasicBlock):
            by_channel = {"conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"}
            placed |= {f"{name}.{key}": Shard(0) for key in by_channel} | {f"{name}.conv2.weight": Shard(1)}
    return placed


def _own_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Of the layer itself, without its children."""
    return dict(layer.named_parameters(recurse=False)) | dict(layer.named_buffers(recurse=False))


def _distribute(layer: nn.Module, placed: dict[str, Placement], mesh: DeviceMesh) -> None:
    for name, tensor in _own_tensors(layer).items():
        # Without a source rank each process cuts its part from its own, equal tensor.
        part: Tensor = distribute_tensor(tensor.detach(), mesh, [placed[name]], src_data_rank=None)
        if isinstance(tensor, nn.Parameter):
            part = nn.Parameter(part, requires_grad=tensor.requires_grad)
        setattr(layer, name, part)


def _derive(layer: nn.Module, kind: type[nn.Module]) -> None:
    """Put `kind` before the layer's class, whatever that is: a plain or a synchronised BatchNorm, say."""
    layer.__class__ = type(f"{kind.__name__.strip('_')}{type(layer).__name__}", (kind, type(layer)), {})


class _ComputesLocally(nn.Module):
    """A layer whose parameters and buffers are DTensors, and whose `forward` sees their local parts."""

    def forward(self, input: Tensor) -> Tensor:
        kept = self._parameters, self._buffers
        # Plain dicts, as the local part of a parameter is not one; running statistics share the DTensors' memory.
        self.__dict__.update(_parameters=_local_parts(kept[0]), _buffers=_local_parts(kept[1]))
        try:
            return cast(Tensor, super().forward(input))
        finally:
            self.__dict__.update(_parameters=kept[0], _buffers=kept[1])


class _ByOutputChannel(nn.Module):
    """A convolution with some of the output channels, of which each process has others."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, super().forward(_SumGradients.apply(input, self.group)))


class _ByInputChannel(nn.Module):
    """A convolution with some of the input channels, of which each process has others."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, _Sum.apply(super().forward(input), self.group))


def _local_parts(tensors: dict[str, Any]) -> dict[str, Any]:
    parts = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    # A channels_last activation makes such gradients, which a DTensor would take for gradients in its own order.
    return {
        name: with_plain_gradient(part) if part is not None and part.requires_grad else part
        for name, part in parts.items()
    }


class _SumGradients(torch.autograd.Function):
    """The input itself; its gradient is the sum over the processes, of which each used it for other channels."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over the processes; all go on with the same value, so each already has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(input, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Of the summands' own precision: in bfloat16 as the convolutions return them, as Megatron does.
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
