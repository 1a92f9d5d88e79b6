"""`tp`: layers split as tensors, Megatron's way with an MLP, for convolutions as for linear layers.

Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053), section 3: the first layer is cut by output channel, so that
what follows it channel by channel, as BatchNorm, ReLU, or attention within a head, needs nobody else; the last by input
channel, so that every process computes a summand of the output, and one all-reduce adds them up. Backward mirrors this,
with one all-reduce of the gradient of the first layer's input. Which layers these are, the network says (see
`models.blocks`). All others are computed by every process; the classifier is split by torch's own `RowwiseParallel`.

Each parameter and buffer becomes a DTensor. The layers compute with its local part. `ShardedStrategy` (`fsdp2.py`) is
the strategy: `tp` is its case of one replica.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from lit_cifar.errors import ConfigError
from lit_cifar.models.blocks import SplitKind, num_tensor_parts, tensor_split_of
from lit_cifar.models.memory_format import with_plain_gradient

# Of a weight, whose dims begin with outputs and inputs. A tensor with fewer dims, as a bias of outputs, is not split.
_SPLIT_DIM: dict[SplitKind, int] = {"columns": 0, "channels": 0, "rows": 1, "head": 1}


def check_divisible(network: nn.Module, num_processes: int, num_replicas: int, *, strategy: str) -> None:
    """Raise a `ConfigError` unless the layers of `network` can be split over so many processes of each replica."""
    num_parts = num_tensor_parts(network)
    if not num_parts:
        raise ConfigError(
            f"--trainer.strategy={strategy} splits layers, and {type(network).__name__} does not say which can be "
            "split.",
            remedy="Give its blocks an attribute tensor_split (see lit_cifar.models.blocks), or use\n"
            "--trainer.strategy=fsdp2, which takes any network.",
        )
    if num_parts % num_processes:
        possible = max(size for size in range(1, num_processes + 1) if num_parts % size == 0)
        raise ConfigError(
            f"--trainer.strategy={strategy} cannot divide the layers of {type(network).__name__}, which have "
            f"{num_parts} parts, among {num_processes} processes",
            remedy=f"pass --trainer.devices={possible * num_replicas}, or another size of the model axis",
        )


def split_tensors(network: nn.Module, mesh: DeviceMesh) -> None:
    """Leave this process its part of every parameter and buffer, in place; nothing is sent.

    `network` is the same in all processes, on their devices. `mesh` has one axis, whose size divides
    `models.blocks.num_tensor_parts`.
    """
    placed, split = placements(network), tensor_split_of(network)
    for name, layer in list(network.named_modules()):
        own = {key: placed[f"{name}.{key}".lstrip(".")] for key in _own_tensors(layer)}
        if own and split.get(name) != "head":
            _derive(layer, _ComputesLocally)
        _distribute(layer, own, mesh)
    for name, part in split.items():
        target: Any = network.get_submodule(name)
        if part == "head":
            parallelize_module(target, mesh, RowwiseParallel(input_layouts=Replicate()))
            # It returns a view, on which the hooks of `fully_shard` could be lost.
            target.register_forward_hook(lambda layer, inputs, output: output.clone())
        elif part in _SENDING:
            _derive(target, _SENDING[part])
            target.group = mesh.get_group()


def placements(network: nn.Module) -> dict[str, Placement]:
    """Along which dim each parameter and buffer is split, by name."""
    split = tensor_split_of(network)
    placed: dict[str, Placement] = {}
    for name, tensor in chain(network.named_parameters(), network.named_buffers()):
        part = split.get(name.rpartition(".")[0])
        dim = None if part is None else split_dim(part, tensor)
        placed[name] = Replicate() if dim is None else Shard(dim)
    return placed


def split_dim(part: SplitKind, tensor: Tensor) -> int | None:
    """Along which dim a parameter or buffer of a layer is split; None if each process has all of it."""
    dim = _SPLIT_DIM[part]
    return dim if dim < tensor.ndim else None


def _own_tensors(layer: nn.Module) -> dict[str, Tensor]:
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
    """A layer with some of the output channels, of which each process has others."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, super().forward(_SumGradients.apply(input, self.group)))


class _ByInputChannel(nn.Module):
    """A layer with some of the input channels, of which each process has others; the bias is added to the sum, once."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        bias, self._parameters["bias"] = self._parameters["bias"], None
        try:
            total = cast(Tensor, _Sum.apply(super().forward(input), self.group))
        finally:
            self._parameters["bias"] = bias
        if bias is None:
            return total
        (local,) = _local_parts({"bias": bias}).values()
        return total + local.to(total.dtype).view(-1, *([1] * (self._parameters["weight"].ndim - 2)))  # type: ignore


_SENDING: dict[SplitKind, type[nn.Module]] = {"columns": _ByOutputChannel, "rows": _ByInputChannel}


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


def sharding_lines(
    network: nn.Module, image_shape: Sequence[int], *, num_replicas: int, each: int, num_bytes: int
) -> list[str]:
    """What the process with the largest part holds and sends when `network`, which is whole, is split.

    There are `num_replicas` of `each` processes, and a parameter has `num_bytes`. `image_shape` is without the batch
    axis.
    """
    placed = placements(network)
    parameters = dict(network.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    per_replica = sum(_part_size(parameter.shape, placed[name], each) for name, parameter in parameters.items())
    held = sum(_part_size(p.shape, placed[name], each, num_replicas=num_replicas) for name, p in parameters.items())
    lines = [
        f"a process holds {held / 1e6:.2f} of {total / 1e6:.2f} M parameters ({held * num_bytes / 1e6:.1f} MB), and as "
        "much of gradients and of each optimizer state"
    ]
    if num_replicas > 1:
        sent = 3 * per_replica * num_bytes * (num_replicas - 1) / num_replicas
        lines.append(
            f"over {num_replicas} replicas, for each backward pass: parameters gathered twice, gradients reduced and "
            f"scattered, {sent / 1e6:.1f} MB sent"
        )
    if each > 1:
        num_sums, num_values = _sums(network, image_shape)
        lines.append(
            f"over the {each} processes of a replica: {num_sums} all-reduces, {num_values / 1e6:.2f} M values an image"
        )
    return lines


@torch.no_grad()
def _sums(network: nn.Module, image_shape: Sequence[int]) -> tuple[int, int]:
    """How many tensors are summed over the processes in forward and backward, and how large they are for an image."""
    skeleton = deepcopy(network).to("meta", torch.float32).eval()
    sizes: list[int] = []
    for name, part in tensor_split_of(skeleton).items():
        layer = skeleton.get_submodule(name)
        if part == "columns":  # in backward: the gradients of its input
            layer.register_forward_pre_hook(lambda layer, inputs: sizes.append(inputs[0].numel()))
        if part == "rows":
            layer.register_forward_hook(lambda layer, inputs, output: sizes.append(output.numel()))
    skeleton(torch.empty(1, *image_shape, device="meta"))
    return len(sizes), sum(sizes)


def _part_size(shape: tuple[int, ...], placement: Placement, each: int, *, num_replicas: int = 1) -> int:
    """Numbers in the largest part: cut for tensor parallelism, and then the first dim over the replicas."""
    sizes = list(shape)
    if not isinstance(placement, Replicate):
        dim: int = placement.dim  # type: ignore[attr-defined]  # Shard's
        sizes[dim] = -(-sizes[dim] // each)
    sizes[0] = -(-sizes[0] // num_replicas)
    return math.prod(sizes)
