"""How tensors are split: the summands of the processes' parts add up to the block, forward and backward."""

from copy import deepcopy
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torchvision.models.resnet import BasicBlock, ResNet

from lit_cifar.models import build_resnet
from lit_cifar.strategies import tensor_parallel
from lit_cifar.strategies.tensor_parallel import NUM_CHANNELS, placements


@pytest.fixture
def network() -> ResNet:
    torch.manual_seed(0)
    return build_resnet("resnet10", stem="imagenet").double()


def part_of(block: BasicBlock, name: str, rank: int, size: int, placed: dict[str, Any]) -> BasicBlock:
    """`block` with the part of process `rank` of every tensor."""
    part = deepcopy(block)
    for layer_name, layer in part.named_modules():
        for key, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            placement = placed[f"{name}.{layer_name}.{key}"]
            if not placement.is_replicate():
                kept = tensor.detach().chunk(size, dim=placement.dim)[rank].clone()
                setattr(layer, key, nn.Parameter(kept) if isinstance(tensor, nn.Parameter) else kept)
    return part


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_a_block_add_up(network: ResNet, size: int) -> None:
    placed = placements(network)
    block = cast(BasicBlock, network.layer2[0])
    x = torch.randn(3, 64, 8, 8, dtype=torch.float64, requires_grad=True)
    parts = [part_of(block, "layer2.0", rank, size, placed) for rank in range(size)]
    hidden = block.conv2(block.relu(block.bn1(block.conv1(x))))
    (expected_grad,) = torch.autograd.grad(hidden.square().sum(), x)
    summands = [part.conv2(part.relu(part.bn1(part.conv1(x)))) for part in parts]
    total = torch.stack(summands).sum(dim=0)
    torch.testing.assert_close(total, hidden)
    grads = [torch.autograd.grad(part, x, 2 * total.detach())[0] for part in summands]
    torch.testing.assert_close(torch.stack(grads).sum(dim=0), expected_grad)
    for name in ("running_mean", "running_var"):
        tracked = torch.cat([getattr(part.bn1, name) for part in parts])
        torch.testing.assert_close(tracked, getattr(block.bn1, name))


def test_what_is_split_and_what_every_process_has(network: ResNet) -> None:
    placed = placements(network)
    assert placed.keys() == network.state_dict().keys()
    split = {name: placement.dim for name, placement in placed.items() if isinstance(placement, Shard)}
    by_output = ("conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var")
    expected = {f"layer{i}.0.{key}": 0 for i in range(1, 5) for key in by_output}
    expected |= {f"layer{i}.0.conv2.weight": 1 for i in range(1, 5)} | {"fc.weight": 1}
    assert split == expected
    assert placed["conv1.weight"] == placed["layer1.0.bn1.num_batches_tracked"] == Replicate()


@pytest.mark.parametrize("arch", ["resnet10", "resnet34"])
def test_every_block_has_a_multiple_of_the_channels(arch: Any) -> None:
    blocks = [block for block in build_resnet(arch).modules() if isinstance(block, BasicBlock)]
    assert all(block.conv1.out_channels % NUM_CHANNELS == 0 for block in blocks)


def test_each_sum_is_taken_in_one_direction_only() -> None:
    with mock.patch.object(tensor_parallel, "_all_reduce", lambda tensor, group: 10 * tensor):
        x = torch.ones(2, requires_grad=True)
        assert torch.equal(cast(Tensor, tensor_parallel._Sum.apply(x, None)), torch.full((2,), 10.0))
        assert torch.equal(cast(Tensor, tensor_parallel._SumGradients.apply(x, None)), torch.ones(2))
        (through_sum,) = torch.autograd.grad(tensor_parallel._Sum.apply(x, None).sum(), x)
        (through_copy,) = torch.autograd.grad(tensor_parallel._SumGradients.apply(x, None).sum(), x)
    assert torch.equal(through_sum, torch.ones(2))
    assert torch.equal(through_copy, torch.full((2,), 10.0))
