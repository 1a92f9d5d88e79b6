"""The networks: torchvision's names, shapes and arithmetic; as chains of blocks, and where these are cut."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from lit_cifar import LitResNet
from lit_cifar.checkpoint.pretrained import take_weights
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.models import Whitening, build_network
from lit_cifar.models.ghost_batchnorm import normalise_apart
from lit_cifar.models.partition import Partition, balanced, measure
from lit_cifar.models.resnet import Stem, build_resnet
from lit_cifar.models.vit import Attention


@pytest.mark.parametrize("arch", ["resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2"])
def test_names_and_shapes_are_those_of_torchvision(arch: Any) -> None:
    with torch.device("meta"):
        ours = build_resnet(arch, stem="cifar", num_classes=1000).state_dict()
        theirs = getattr(torchvision.models, arch)().state_dict()
    assert list(ours) == list(theirs)
    assert [name for name in ours if ours[name].shape != theirs[name].shape] == ["conv1.weight"]


@pytest.mark.parametrize("arch", ["resnet18", "resnet34", "resnet50"])
def test_with_torchvisions_stem_it_is_torchvisions_network(arch: Any) -> None:
    """The initial weights, and with other weights and running statistics the outputs."""
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, arch)().train()
    torch.manual_seed(0)
    ours = build_resnet(arch, stem="imagenet", num_classes=1000)
    assert all(a.equal(b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    images = torch.randn(2, 3, 64, 64)
    theirs(images)
    take_weights(ours, theirs.state_dict(), num_classes=1000)
    assert ours.eval()(images).equal(theirs.eval()(images))


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


def test_whitening_makes_patches_uncorrelated_and_rounds_no_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(700, 3, 12, 12, dtype=torch.float64, generator=generator)
    smooth = F.avg_pool2d(noise, 3, stride=1)
    images = 3 * smooth + smooth.mean(dim=1, keepdim=True)
    found, again = Whitening().double(), Whitening().double()
    found.whiten(images)
    again.whiten(images[torch.randperm(700, generator=generator)])
    assert again.conv.weight.equal(found.conv.weight)
    assert not found.conv.weight.requires_grad
    outputs = found.conv(images).transpose(0, 1).flatten(1)
    assert outputs[12:].equal(-outputs[:12])
    correlations = outputs[:12] @ outputs[:12].T / outputs.shape[1]
    # Not nearer, as 5e-4 is added to each variance.
    torch.testing.assert_close(correlations, torch.eye(12, dtype=torch.float64), atol=0.05, rtol=0)


def test_the_fast_network_is_that_of_the_paper() -> None:
    """Its FLOP by hand, as the paper counts them, three times for training: 3.6e14 in 9.9 epochs of 50,000 images."""
    network = build_network("fast", stem=None, num_classes=10, image_size=32)
    flop = sum(block.flop for block in measure(network, IMAGE))
    assert 9.9 * 50_000 * 3 * flop == pytest.approx(3.6e14, rel=0.03)
    frozen = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    assert frozen == ["whitening.conv.weight", *(f"group{g}.norm{n}.weight" for g in (1, 2, 3) for n in (1, 2))]
    x = torch.randn(2, 24, 8, 8)
    torch.testing.assert_close(network.get_submodule("group1.conv1")(x)[:, :24], x)


def test_a_stage_may_have_buffers_that_are_not_saved_and_layers_of_one_weight() -> None:
    class Place(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("place", torch.ones(4), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.get_buffer("place")

    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), Place(), nn.Linear(4, 4), nn.Linear(4, 4))
    network[4].weight = network[3].weight
    partition = Partition.cut(network, (3, 2, 2), num_stages=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = partition.outputs(network, torch.zeros(2, 3, 2, 2))
    assert len(found) == 2


@pytest.mark.parametrize("arch", ["tiny", "vit_micro", "fast"])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_stage_returns_is_known_before_it_runs(arch: Any, autocast: bool) -> None:
    """Under autocast the patches of a ViT are added in float32; what a ResNet's blocks return is bfloat16."""
    module = LitResNet(arch)
    partition = Partition.cut(module.network, module.image_shape, num_stages=3)
    before = {name: tensor.clone() for name, tensor in module.network.state_dict().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = partition.outputs(module.network, torch.zeros(2, 3, 32, 32))
        assert all(tensor.equal(before[name]) for name, tensor in module.network.state_dict().items())
        x = torch.zeros(2, 3, 32, 32)
        for stage, output in zip(partition.modules(module.network), found, strict=True):
            x = stage(x)
            assert (x.shape[1:], x.dtype) == output
    assert (found[1][1] == torch.bfloat16) == (autocast and arch != "vit_micro")


IMAGE = (3, 32, 32)


def largest(flop: list[int], bounds: tuple[int, ...]) -> int:
    """FLOP of the largest stage when stages begin at `bounds`."""
    return max(sum(flop[a:b]) for a, b in pairwise((0, *bounds, len(flop))))


@pytest.mark.parametrize(("num_stages", "stem"), [(1, "cifar"), (2, "strided"), (3, "imagenet"), (6, "imagenet")])
def test_stages_one_after_the_other_are_the_network_bit_for_bit(num_stages: int, stem: Stem) -> None:
    """Outputs, gradients and running statistics, as the stages are made of the network's own layers."""
    torch.manual_seed(0)
    one, other = build_resnet("tiny", stem=stem), build_resnet("tiny", stem=stem)
    other.load_state_dict(one.state_dict())
    images = torch.randn(4, 3, 32, 32)
    expected = one(images)
    x = images
    names = [name for name, _ in other.named_modules()]
    partition = Partition.cut(other, IMAGE, num_stages=num_stages)
    stages = partition.modules(other)
    for stage, module in zip(partition.stages, stages, strict=True):
        x = module(x)
        assert x.shape == (4, *stage[-1].output_shape)
    assert x.equal(expected)
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True))
    assert [name for name, _ in other.named_modules()] == names
    expected.square().sum().backward()
    x.square().sum().backward()
    assert all(a.grad.equal(b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert all(a.equal(b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_cuts_do_not_depend_on_the_state_of_the_network_which_stays() -> None:
    plain, changed = (build_resnet("tiny", stem="imagenet") for _ in range(2))
    normalise_apart(changed, GhostBatches(data_parallel_size=2))
    changed.double().eval().requires_grad_(False)
    before = {key: tensor.clone() for key, tensor in changed.state_dict().items()}
    assert measure(changed, IMAGE) == measure(plain, IMAGE)
    assert not changed.training
    assert all(p.grad is None and p.device.type == "cpu" for p in plain.parameters())
    assert all(tensor.equal(before[key]) for key, tensor in changed.state_dict().items())


@pytest.mark.parametrize("seed", range(10))
def test_cuts_are_the_best_that_there_are(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_blocks = int(torch.randint(2, 9, (), generator=generator))
    flop: list[int] = torch.randint(1, 20, (num_blocks,), generator=generator).tolist()
    for num_stages in range(1, num_blocks + 1):
        bounds = balanced(flop, num_stages)
        assert len(bounds) == num_stages - 1
        choices = combinations(range(1, num_blocks), num_stages - 1)
        assert largest(flop, bounds) == min(largest(flop, choice) for choice in choices)


@pytest.mark.parametrize("num_stages", [0, 7])
def test_impossible_numbers_of_stages_are_refused(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_stages} stages of a network of 6 blocks(.|\n)*1 to 6"):
        Partition.cut(build_resnet("resnet10", stem="imagenet"), IMAGE, num_stages=num_stages)


def test_table() -> None:
    """Shares add up, the bytes are those of the images' activations in float32, the last stage sends nothing."""
    network = build_resnet("resnet34", stem="cifar")
    partition = Partition.cut(network, IMAGE, num_stages=2)
    flop = sum(block.flop for stage in partition.stages for block in stage)
    assert 3 * flop == pytest.approx(6.95e9, rel=1e-3)  # and backward
    assert partition.table(["cpu:0", "cuda:1"]) == [
        "0  cpu:0       stem to layer3.0         49.4% of FLOP    2.26 M parameters  sends 64 KiB per image",
        "1  cuda:1      layer3.1 to head         50.6% of FLOP   19.02 M parameters  sends -",
    ]
    assert partition.modules(network)[0](torch.zeros(1, 3, 32, 32)).nbytes == 64 * 1024
