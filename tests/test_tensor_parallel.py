"""How `tp` splits tensors; that the processes compute what one does, `test_verify` and `test_parity` show."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from lit_cifar import LitResNet
from lit_cifar.models import build_resnet
from lit_cifar.models.blocks import num_tensor_parts
from lit_cifar.strategies import tp
from lit_cifar.strategies.tp import placements


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
