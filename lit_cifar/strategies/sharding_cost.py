"""What a process holds and sends when a network is sharded: plain arithmetic, before any process has its part."""

import math
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate

from lit_cifar.models.blocks import tensor_split_of
from lit_cifar.strategies.tensor_parallel import placements


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
    held = largest_part(network, num_replicas=num_replicas, each=each)
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


def largest_part(network: nn.Module, *, num_replicas: int, each: int) -> int:
    """Parameters, counted as numbers, in the process with the most; arguments as of `sharding_lines`."""
    placed = placements(network)
    return sum(
        _part_size(parameter.shape, placed[name], each, num_replicas=num_replicas)
        for name, parameter in network.named_parameters()
    )


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
