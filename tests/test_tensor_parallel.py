"""How tensors are split: what the processes compute of a network in parts is the network, forward and backward."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Barrier
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from lit_cifar import LitResNet
from lit_cifar.models import build_resnet
from lit_cifar.models.blocks import num_tensor_parts, tensor_split_of
from lit_cifar.strategies import tp
from lit_cifar.strategies.tp import placements


def network_of(arch: Any) -> nn.Module:
    torch.manual_seed(0)
    network = LitResNet(arch).network.double()
    for parameter in network.parameters():  # no gradient is zero, no bias either
        nn.init.normal_(parameter, std=0.1)
    return network


def parts_of(tensor: Tensor, placement: Any, size: int) -> list[Tensor]:
    """What each of `size` processes has of it."""
    if placement.is_replicate():
        return [tensor.detach().clone() for _ in range(size)]
    return [part.clone() for part in tensor.detach().chunk(size, dim=placement.dim)]


def in_parts(network: nn.Module, size: int) -> list[nn.Module]:
    """The network as each of `size` processes has it, with the process's number for the group that it sends to."""
    placed = placements(network)
    networks = [deepcopy(network) for _ in range(size)]
    for rank, part in enumerate(networks):
        for name, kind in tensor_split_of(part).items():
            layer = part.get_submodule(name)
            if kind == "head":  # torch's own; here it stays whole
                continue
            for key, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
                kept = parts_of(tensor, placed[f"{name}.{key}"], size)[rank]
                setattr(layer, key, nn.Parameter(kept) if isinstance(tensor, nn.Parameter) else kept)
            if kind != "channels":
                tp._derive(layer, tp._SENDING[kind])
                layer.group = rank
    return networks


def summing(size: int) -> Callable[[Tensor, int], Tensor]:
    """An all-reduce among threads."""
    barrier, given = Barrier(size, timeout=30), [torch.empty(0)] * size

    def all_reduce(tensor: Tensor, rank: int) -> Tensor:
        given[rank] = tensor
        barrier.wait()
        total = torch.stack(given).sum(dim=0)
        barrier.wait()
        return total

    return all_reduce


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("arch", ["tiny", "tiny_bottleneck", "vit_micro"])
def test_the_parts_of_a_network_are_the_network(arch: str, size: int) -> None:
    network = network_of(arch)
    placed, networks = placements(network), in_parts(network, size)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)

    def step(part: nn.Module) -> Tensor:
        logits = cast(Tensor, part(images))
        logits.square().sum().backward()
        return logits.detach()

    expected = step(network)
    with mock.patch.object(tp, "_all_reduce", summing(size)), ThreadPoolExecutor(size) as pool:
        for logits in pool.map(step, networks):
            torch.testing.assert_close(logits, expected)
    heads = [name for name, kind in tensor_split_of(network).items() if kind == "head"]
    for name, tensor in network.state_dict(keep_vars=True).items():
        placement = Replicate() if name.rpartition(".")[0] in heads else placed[name]
        for part, whole in zip(networks, parts_of(tensor, placement, size), strict=True):
            torch.testing.assert_close(part.state_dict()[name], whole)
        if tensor.requires_grad:
            assert tensor.grad is not None
            assert tensor.grad.abs().max() > 0
            for part, whole in zip(networks, parts_of(tensor.grad, placement, size), strict=True):
                torch.testing.assert_close(part.get_parameter(name).grad, whole)


def test_what_is_split_and_what_every_process_has() -> None:
    network = build_resnet("resnet10", stem="imagenet")
    placed = placements(network)
    assert placed.keys() == network.state_dict().keys()
    split = {name: placement.dim for name, placement in placed.items() if isinstance(placement, Shard)}
    by_output = ("conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var")
    expected = {f"layer{i}.0.{key}": 0 for i in range(1, 5) for key in by_output}
    expected |= {f"layer{i}.0.conv2.weight": 1 for i in range(1, 5)} | {"fc.weight": 1}
    assert split == expected
    assert placed["conv1.weight"] == placed["layer1.0.bn1.num_batches_tracked"] == Replicate()


@pytest.mark.parametrize(
    ("arch", "num_parts"), [("tiny", 8), ("resnet34", 64), ("resnet50", 64), ("wide_resnet50_2", 128), ("vit_tiny", 12)]
)
def test_into_how_many_parts_a_network_can_be_cut(arch: Any, num_parts: int) -> None:
    with torch.device("meta"):
        assert num_tensor_parts(LitResNet(arch).network) == num_parts


def test_a_sum_keeps_the_type_of_its_terms_though_its_bias_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp, "_all_reduce", lambda tensor, group: tensor)
    layer: Any = nn.Linear(4, 3)
    tp._derive(layer, tp._SENDING["rows"])
    layer.group = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 4)).dtype == torch.bfloat16
