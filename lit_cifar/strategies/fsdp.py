"""Where FSDP2 divides the network, and in which types it gathers it."""

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchvision.models.resnet import BasicBlock, ResNet


def shard(network: ResNet, mesh: DeviceMesh, *, dtype: torch.dtype | None = None) -> None:
    """Apply `fully_shard` in place: stem, residual blocks and head are gathered one at a time.

    Args:
        network: On this process's device; its parameters may be DTensors on another axis of the same mesh.
        mesh: One axis.
        dtype: In which convolutions and classifier compute, and so are gathered; their gradients are summed in the
            parameters' own. BatchNorm, which computes in that, is then gathered apart.
    """
    narrow = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    if dtype is not None:
        for part in (network, *residual_blocks(network)):
            fully_shard(_own_batchnorm(part), mesh=mesh)
    fully_shard([network.conv1, network.bn1] if dtype is None else network.conv1, mesh=mesh, mp_policy=narrow)
    for block in residual_blocks(network):
        fully_shard(block, mesh=mesh, mp_policy=narrow)
    fully_shard(network.fc, mesh=mesh, mp_policy=narrow)
    fully_shard(network, mesh=mesh, mp_policy=narrow)


def residual_blocks(network: nn.Module) -> list[BasicBlock]:
    """In their order."""
    return [module for module in network.modules() if isinstance(module, BasicBlock)]


def _own_batchnorm(part: ResNet | BasicBlock) -> list[nn.Module]:
    """Those of a block, or the network's that are in no block."""
    if isinstance(part, ResNet):
        return [part.bn1]
    return [layer for layer in part.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """In which layers compute under autocast; None without it."""
    if not isinstance(precision, MixedPrecision):
        return None
    return torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16
