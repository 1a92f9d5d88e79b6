"""`tp`: layers split as tensors, Megatron's way with an MLP, for convolutions as for linear layers.

Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053), section 3: the first layer is cut by output channel, so that
layers that treat each channel alone, such as BatchNorm, ReLU, or attention within a head, need no message; the last by
input channel, so that every process computes a summand of the output, and one all-reduce adds them up. Backward mirrors
this, with one all-reduce of the gradient of the first layer's input. Which layers these are, the network says (see
`models.blocks`). All others are computed by every process; the classifier is split by torch's own `RowwiseParallel`.

Parameters and buffers become DTensors; layers compute with local parts. It is `fsdp2.py`'s `ShardedStrategy`.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from lit_cifar.errors import ConfigError
from lit_cifar.mode import Layout
from lit_cifar.mode.tensors import local_part
from lit_cifar.models.blocks import SplitKind, num_tensor_parts, tensor_split_of
from lit_cifar.models.memory_format import with_plain_gradient
from lit_cifar.strategies.mesh import move_and_broadcast

# The dim that is split. A weight's dims begin with outputs and inputs; a tensor with fewer, such as a bias, is whole.
_SPLIT_DIM: dict[SplitKind, int] = {"columns": 0, "channels": 0, "rows": 1, "head": 1}


def check_divisible(network: nn.Module, layout: Layout, *, strategy: str) -> None:
    """Raise a `ConfigError` unless the layers of `network` can be split over the processes of each replica."""
    num_parts, num_processes, kind = num_tensor_parts(network), layout.model_parallel_size, type(network).__name__
    if not num_parts:
        problem = f"--trainer.strategy={strategy} splits layers, and {kind} does not say which can be split"
        raise ConfigError(problem, remedy="give its blocks tensor_split, or pass --trainer.strategy=fsdp2")
    if num_parts % num_processes:
        possible = max(size for size in range(1, num_processes + 1) if num_parts % size == 0)
        parts = f"{num_processes} processes, and layers of {kind} have {num_parts} parts"
        problem = f"--trainer.strategy={strategy} on {parts}"
        raise ConfigError(problem, remedy=f"pass --trainer.devices={possible * layout.data_parallel_size}")


def split_tensors(network: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Leave this process its part of every parameter and buffer of the first process, in place, on `device`."""
    split = tensor_split_of(network)
    for name, split_as in split.items():
        target: Any = network.get_submodule(name)
        if split_as in _SENDING:
            _derive(target, _SENDING[split_as])
            target.group = mesh.get_group()
    for name, layer in list(network.named_modules()):
        own = dict(layer.named_parameters(recurse=False)) | dict(layer.named_buffers(recurse=False))
        kind = split.get(name)
        for count in {"groups", "num_groups"} & vars(layer).keys() if kind == "channels" else ():
            if vars(layer)[count] % mesh.size():
                problem = f"--trainer.strategy=tp divides channels of {name}, which has {count}={vars(layer)[count]}"
                raise ConfigError(problem, remedy=f"give it a multiple of {mesh.size()}")
            setattr(layer, count, vars(layer)[count] // mesh.size())
        for key, tensor in own.items():
            move_and_broadcast([tensor], device)
            place: list[Placement] = [Shard(dim) if kind and (dim := _SPLIT_DIM[kind]) < tensor.ndim else Replicate()]
            # Without a source rank each process cuts its part from its own, equal tensor.
            part: Tensor = distribute_tensor(tensor.detach(), mesh, place, src_data_rank=None)
            if isinstance(tensor, nn.Parameter):
                part = nn.Parameter(part, requires_grad=tensor.requires_grad)
            setattr(layer, key, part)
        if kind == "head":
            parallelize_module(layer, mesh, RowwiseParallel(input_layouts=Replicate()))
            # The layer returns a view of a sum that may still be on its way: nobody could detach it in an evaluation.
            layer.register_forward_hook(lambda layer, inputs, output: output.clone())
        elif own:
            _derive(layer, _ComputesLocally)


def _derive(layer: nn.Module, kind: type[nn.Module]) -> None:
    """Put `kind` before the layer's class, which may be any, such as a plain or a synchronised BatchNorm."""
    layer.__class__ = type(f"{kind.__name__.strip('_')}{type(layer).__name__}", (kind, type(layer)), {})


class _ComputesLocally(nn.Module):
    """A layer whose parameters and buffers are DTensors, and whose `forward` sees their local parts."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        kept = self._parameters, self._buffers
        # Plain dicts, as a parameter's local part is no Parameter; running statistics share the DTensors' memory.
        self.__dict__.update(_parameters=_local_parts(kept[0]), _buffers=_local_parts(kept[1]))
        try:
            return super().forward(*inputs, **options)
        finally:
            self.__dict__.update(_parameters=kept[0], _buffers=kept[1])


class _ByOutputChannel(nn.Module):
    """A layer with some of the output channels, different ones in each process."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, super().forward(_SumGradients.apply(input, self.group)))


class _ByInputChannel(nn.Module):
    """A layer with some of the input channels, different ones in each process; the bias is added to the sum, once."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        # `_ComputesLocally` has collected these local parts for this call alone, so the bias may be removed.
        bias, self._parameters["bias"] = self._parameters["bias"], None
        total = cast(Tensor, _Sum.apply(super().forward(input), self.group))
        if bias is None:
            return total
        return total + bias.to(total.dtype).view(-1, *([1] * (self._parameters["weight"].ndim - 2)))  # type: ignore


_SENDING: dict[SplitKind, type[nn.Module]] = {"columns": _ByOutputChannel, "rows": _ByInputChannel}


def _local_parts(tensors: dict[str, Any]) -> dict[str, Any]:
    parts = {name: None if tensor is None else local_part(tensor) for name, tensor in tensors.items()}
    trained = {name: part for name, part in parts.items() if part is not None and part.requires_grad}
    # A channels_last activation makes other gradients, which a DTensor would take for gradients in its own order.
    return parts | {name: with_plain_gradient(part) for name, part in trained.items()}


class _SumGradients(torch.autograd.Function):
    """The input itself. Its gradient is summed over the processes, which use it for different channels."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over the processes. All go on with the same value, so each already has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(input, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def summed(tensor: Tensor) -> Tensor:
    """The sum over all processes, of which each uses it in another way: its gradient is the sum of theirs."""
    return cast(Tensor, _SumGradients.apply(_Sum.apply(tensor, None), None))


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # The sum has the summands' dtype, such as bfloat16 from convolutions under autocast. Megatron does the same.
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
