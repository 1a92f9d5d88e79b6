"""The networks: torchvision's names, shapes and arithmetic."""

import pytest
import torch
import torchvision

from lit_cifar.models import Stem, build_resnet


def test_imagenet_stem_is_torchvisions_resnet34() -> None:
    torch.manual_seed(0)
    ours = build_resnet("resnet34", stem="imagenet")
    torch.manual_seed(0)
    theirs = torchvision.models.resnet34(num_classes=10)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(a.equal(b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))


@pytest.mark.parametrize(("stem", "side"), [("cifar", 32), ("strided", 16)])
def test_small_stems_keep_names_and_resolution(stem: Stem, side: int) -> None:
    network = build_resnet("resnet34", stem=stem)
    assert list(network.state_dict()) == list(torchvision.models.resnet34(num_classes=10).state_dict())
    features = network.maxpool(network.relu(network.bn1(network.conv1(torch.zeros(2, 3, 32, 32)))))
    assert features.shape == (2, 64, side, side)
    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(21.28e6, rel=1e-3)


@pytest.mark.parametrize("stem", ["cifar", "strided", "imagenet"])
def test_logits(stem: Stem) -> None:
    assert build_resnet("resnet10", stem=stem, num_classes=7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
