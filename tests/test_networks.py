"""The networks: torchvision's names, shapes and arithmetic, and chains of blocks; `test_parity` has the modes."""

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from lit_cifar import LitResNet
from lit_cifar.checkpoint.format import load_weights
from lit_cifar.models import Stem, build_resnet
from lit_cifar.models.blocks import Partition
from lit_cifar.models.vit import Attention
from lit_cifar.strategies.pipeline import output_dtypes


@pytest.mark.parametrize("arch", ["resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2"])
@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_names_and_shapes_are_those_of_torchvision(arch: Any, stem: Stem) -> None:
    with torch.device("meta"):
        ours = build_resnet(arch, stem=stem, num_classes=1000).state_dict()
        theirs = getattr(torchvision.models, arch)().state_dict()
    assert list(ours) == list(theirs)
    assert {name for name in ours if ours[name].shape != theirs[name].shape} <= {"conv1.weight"}
    assert ours["conv1.weight"].shape[2:] == ((3, 3) if stem == "cifar" else (7, 7))


def test_imagenet_stem_is_torchvisions_resnet34() -> None:
    torch.manual_seed(0)
    ours = build_resnet("resnet34", stem="imagenet")
    torch.manual_seed(0)
    theirs = torchvision.models.resnet34(num_classes=10)
    assert all(a.equal(b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))


@pytest.mark.parametrize("arch", ["resnet18", "resnet34", "resnet50"])
def test_with_the_weights_of_torchvision_the_outputs_are_those_of_torchvision(arch: Any) -> None:
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, arch)().train()
    images = torch.randn(2, 3, 64, 64)
    theirs(images)  # running statistics other than those of a new network
    ours = build_resnet(arch, stem="imagenet", num_classes=1000)
    load_weights(ours, theirs.state_dict(), any_classes=True)
    for network in (ours, theirs):
        network.eval()
    assert ours(images).equal(theirs(images))


@pytest.mark.parametrize(("stem", "side"), [("cifar", 32), ("strided", 16), ("imagenet", 8)])
def test_resolution_behind_the_stem(stem: Stem, side: int) -> None:
    network = build_resnet("tiny", stem=stem, num_classes=7)
    images = torch.zeros(2, 3, 32, 32)
    assert network.blocks()["stem"](images).shape == (2, 64, side, side)
    assert network(images).shape == (2, 7)


def test_attention_is_that_of_torch() -> None:
    """Whose outputs are all queries, all keys, all values; here head by head."""
    torch.manual_seed(0)
    ours = Attention(24, num_heads=3).double()
    theirs = nn.MultiheadAttention(24, 3, batch_first=True, dtype=torch.float64)
    for parameter, rows in ((theirs.in_proj_weight, ours.qkv.weight), (theirs.in_proj_bias, ours.qkv.bias)):
        by_head = rows.detach().unflatten(0, (3, 3, 8))  # heads, kinds, values of a head
        parameter.data = by_head.transpose(0, 1).flatten(0, 2)
    theirs.out_proj.load_state_dict(ours.projection.state_dict())
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])


@pytest.mark.parametrize("arch", ["tiny", "vit_micro"])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_stage_returns_is_known_before_it_runs(arch: Any, autocast: bool) -> None:
    """Under autocast the patches of a ViT are added in float32; what a ResNet's blocks return is bfloat16."""
    module = LitResNet(arch)
    partition = Partition.of(module.network, module.image_shape, num_stages=3)
    before = {name: tensor.clone() for name, tensor in module.network.state_dict().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = output_dtypes(module.network, partition, torch.float32, device=torch.device("cpu"))
        assert all(tensor.equal(before[name]) for name, tensor in module.network.state_dict().items())
        x = torch.zeros(2, 3, 32, 32)
        for stage, dtype in zip(partition.stages, found, strict=True):
            x = stage.module(module.network)(x)
            assert x.dtype == dtype
    assert (found[1] == torch.bfloat16) == (autocast and arch == "tiny")
