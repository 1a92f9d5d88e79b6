"""Memory and time of a training step with and without `--model.recompute=true`, in turn:

python benchmarks/scripts/recompute.py found.json --archs resnet18 resnet34 vit_tiny
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from run_record import complete, run_script
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_cifar import LitResNet
from lit_cifar.models.recomputed import keep_activations, recompute_blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from device_bytes import DEVICE, DeviceBytes


def peak_bytes(arch: Any, batch: tuple[Tensor, Tensor], *, recomputed: bool) -> int:
    """The most bytes that the tensors of a step have at once, beyond weights, buffers and the batch."""
    with DeviceBytes() as counted:
        network = _network(arch).to(DEVICE)
        if recomputed:
            recompute_blocks(network)
        images, labels = (tensor.to(DEVICE) for tensor in batch)
        step = partial(_step, network, images, labels)
        step()  # the gradients are there from now on
        before = counted.peak = counted.held
        step()
        return int(counted.peak - before)


def _network(arch: Any) -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = LitResNet(arch).network
    return network


def _step(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    for parameter in network.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    loss: Any = cross_entropy(network(images), labels)
    loss.backward()


def measured(arch: str, *, batch_size: int, times: int) -> dict[str, Any]:
    """Peak bytes, and the processor seconds of each of `times` steps of both kinds, which take turns."""
    torch.manual_seed(1)
    batch = torch.rand(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))
    row: dict[str, Any] = {"arch": arch, "kept_s": [], "recomputed_s": []}
    network = _network(arch)
    for turn in range(times + 1):
        for name, change in (("kept", keep_activations), ("recomputed", recompute_blocks)):
            change(network)
            begin = process_time()  # not the clock's: other programs may run
            _step(network, *batch)
            if turn:  # the first of each kind warms up
                row[f"{name}_s"].append(round(process_time() - begin, 4))
    pairs = zip(row["recomputed_s"], row["kept_s"], strict=True)
    kinds = {"kept": False, "recomputed": True}
    peaks = {f"{name}_bytes": peak_bytes(arch, batch, recomputed=again) for name, again in kinds.items()}
    ratios = sorted(twice / once for twice, once in pairs)
    found = {"time_ratio": median(ratios), "time_ratio_largest": ratios[-1]}
    return row | peaks | found | {"memory_ratio": peaks["recomputed_bytes"] / peaks["kept_bytes"]}


def main(output: Path, archs: list[str], batch_size: int, times: int, flags: list[str]) -> None:
    settings = {"archs": archs, "batch_size": batch_size, "times": times}
    one = partial(measured, batch_size=batch_size, times=times)
    complete(output, archs, one, settings=settings, tell=print)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("output", type=Path, help="JSON file to write")
    found.add_argument("--archs", nargs="+", default=["resnet18"])
    found.add_argument("--batch_size", type=int, default=64)
    found.add_argument("--times", type=int, default=5)
    return found


if __name__ == "__main__":
    run_script(parser(), main)
