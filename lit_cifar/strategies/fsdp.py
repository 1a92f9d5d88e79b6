"""Where FSDP2 divides the network, and in which types it gathers it."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lit_cifar.models.blocks import blocks_of
from lit_cifar.strategies.parts import Parts
from lit_cifar.strategies.tree_sum import tree_reduce_scatter

# What autocast computes in the narrow type. Of all else it takes the parameters as they are.
NARROW = (nn.modules.conv._ConvNd, nn.Linear)


def shard(network: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype | None = None) -> None:
    """Apply `fully_shard` in place: the network's blocks are gathered one at a time; without blocks, all of it at once.

    Parameters may be DTensors on another axis of the mesh than this one. Convolutions and linear layers compute in
    `dtype`, and so are gathered in it; gradients are summed in the parameters' own. Other layers of a block, BatchNorm
    say, are then gathered apart.
    """
    # Autocast casts what layers take, as on one device.
    reduce_dtype = None if dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in (blocks_of(network) or {}).values():
        wide = [] if dtype is None else list(_wide_layers(block))
        if wide:
            fully_shard(wide, mesh=mesh)
        # A ResNet's stem and head are chains of its layers, and no modules of it.
        modules = [block] if _is_part(block, network) else list(block.children())
        rest = [module for module in modules if module not in wide and _has_parameters(module)]
        if rest:
            fully_shard(rest if len(rest) > 1 else rest[0], mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh)


class TreeReduceScatter:
    """For `set_custom_reduce_scatter`: the mean over all parts, summed in the order of the tree.

    The whole gradients of all parts but the last are kept. For them zeros are returned, which Lightning forgets before
    the backward of the last one.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._total = parts.new_sum()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for what is reduced, and for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **kwargs: Any) -> None:
        """Fill `output_tensor`, (n,), from `input_tensor`, (n * processes,)."""
        if input_tensor.is_cuda:  # it is made on another stream than it is added on
            input_tensor.record_stream(torch.cuda.current_stream())
        self._total.push(input_tensor)
        if self._total.count < self._parts.count:
            output_tensor.zero_()
            return
        total = tree_reduce_scatter(self._total.take(), group=group)
        torch.mul(total, 1 / self._parts.num_parts, out=output_tensor)


def reduce_in_tree(network: nn.Module, parts: Parts) -> None:
    """Let each sharded module of `network` reduce its gradients by a `TreeReduceScatter`, which also divides them."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(cast(Any, TreeReduceScatter(parts)))
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def whole_blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks that are modules of the network; without any, the network itself."""
    blocks = (blocks_of(network) or {}).values()
    return [block for block in blocks if _is_part(block, network)] or [network]


def _is_part(block: nn.Module, network: nn.Module) -> bool:
    return any(block is module for module in network.modules())


def _wide_layers(block: nn.Module) -> Iterator[nn.Module]:
    """Single layers with parameters of their own that autocast leaves as they are."""
    for layer in block.modules():
        is_single = not any(True for _ in layer.children())
        if is_single and _has_parameters(layer) and not isinstance(layer, NARROW):
            yield layer


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """In which layers compute under autocast; None without it."""
    if not isinstance(precision, MixedPrecision):
        return None
    return torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16


class OutsideInferenceMode:
    """Runs the network for evaluation without autograd, but never in inference mode.

    There `fully_shard` would gather parameters into tensors that no later training step may use.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self, images: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled():
            return cast(Tensor, self.network(images))
        with torch.inference_mode(False), torch.no_grad():
            return cast(Tensor, self.network(images.clone()))
