"""Do copies between devices arrive: faults are found and named, and a training refuses what is found."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_cifar.errors import ConfigError
from lit_cifar.strategies import DataParallelStrategy, DDPLayerParallelStrategy, LayerParallelStrategy, device_copies
from lit_cifar.strategies.base import CustomForwardStrategy
from lit_cifar.strategies.device_copies import copy_faults, refuse_faulty_copies

CPU = torch.device("cpu")
CUDA = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Spoiling:
    """Copies, but not every fourth time."""

    def __init__(self, kind: str) -> None:
        self.kind, self.count, self.earlier = kind, 0, torch.zeros(0)

    def __call__(self, source: Tensor, out: Tensor) -> None:
        self.count += 1
        if self.count % 4:
            out.copy_(source)
        elif self.kind == "torn":
            out[: len(out) // 2] = source[: len(out) // 2]
        elif self.kind == "stale" and len(self.earlier) == len(out):
            out.copy_(self.earlier)
        elif self.kind == "flipped":
            out.copy_(source)[3] ^= 2**40
        self.earlier = source


@pytest.mark.parametrize("kind", ["lost", "torn", "stale", "flipped"])
def test_each_fault_is_found(kind: str) -> None:
    """Two pairs, so the fourth copy is the second of the second size."""
    assert copy_faults([CPU] * 3) == {}
    kept = ", the destination kept its old content" if kind in ("lost", "torn") else ""
    wrong = {"torn": "524,288", "flipped": "8"}.get(kind, "1,048,576")
    said = f"of a copy of 1,048,576 bytes from cpu:1 to cpu:0 {wrong} did not arrive{kept}"
    assert copy_faults([CPU] * 2, copy=Spoiling(kind))["cpu:1", "cpu:0"] == said


def test_a_fault_is_refused_with_the_pair_and_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "copy_faults", lambda devices: {("cuda:0", "cuda:1"): "8 bytes are lost"})
    with pytest.raises(ConfigError) as refused:
        refuse_faulty_copies(CUDA, strategy="dp")
    for words in ("8 bytes are lost", "NCCL_P2P_DISABLE=1", "--trainer.strategy=ddp", "--trainer.devices=1", "IOMMU"):
        assert words in str(refused.value)


def tried(monkeypatch: pytest.MonkeyPatch, strategy: CustomForwardStrategy, *, local_rank: int = 0) -> list[Any]:
    """The groups of devices that a strategy tries when it is set up."""
    found: list[Any] = []
    tries = "lit_cifar.strategies.base.refuse_faulty_copies"
    monkeypatch.setattr(tries, lambda devices, strategy: found.append(devices))
    monkeypatch.setattr("lightning.pytorch.strategies.ParallelStrategy.setup_environment", lambda self: None)
    monkeypatch.setattr("lightning.pytorch.strategies.DDPStrategy.setup_environment", lambda self: None)
    environment: Any = SimpleNamespace(local_rank=lambda: local_rank)
    strategy.cluster_environment = environment
    strategy.setup_environment()
    return found


def test_modes_that_copy_between_cuda_devices_try_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the CPU, nor where one device has all."""
    four = [torch.device("cuda", index) for index in range(4)]
    assert tried(monkeypatch, DataParallelStrategy(parallel_devices=four)) == [four]
    assert tried(monkeypatch, LayerParallelStrategy(num_stages=4, parallel_devices=CUDA)) == [CUDA]
    ddp_mp = DDPLayerParallelStrategy(parallel_devices=four)
    assert tried(monkeypatch, ddp_mp) == [four[:2], four[2:]]
    assert tried(monkeypatch, ddp_mp, local_rank=1) == []
    for devices in ([CPU, CPU], CUDA[:1]):
        assert tried(monkeypatch, DataParallelStrategy(num_replicas=2, parallel_devices=devices)) == []
        assert tried(monkeypatch, LayerParallelStrategy(num_stages=2, parallel_devices=devices)) == []
