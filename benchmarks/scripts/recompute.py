"""Memory and time of a training step with and without `--model.recompute=true`, in turn:

python benchmarks/scripts/recompute.py found.json --archs resnet18 resnet34 vit_tiny
python benchmarks/scripts/recompute.py found.json --archs resnet34 vit_tiny --batch_size 512 --device cuda

On a GPU a step is one of bf16-mixed in channels_last.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from run_record import complete, run_script
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_cifar import LitResNet
from lit_cifar.models.recomputed import keep_activations, recompute_blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from device_bytes import DEVICE, DeviceBytes

_WARM_UP = 3  # steps of each kind


def training(arch: Any, batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
    """A network on a device, and what computes its gradients of the batch."""
    layout = torch.channels_last if device.type == "cuda" else torch.preserve_format
    torch.manual_seed(0)
    network: nn.Module = LitResNet(arch).network.to(device, memory_format=layout)
    images, labels = batch
    return network, partial(_step, network, images.to(device, memory_format=layout), labels.to(device))


def _step(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    for parameter in network.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    with torch.autocast("cuda", torch.bfloat16, enabled=images.is_cuda):
        loss: Any = cross_entropy(network(images), labels)
    loss.backward()


def peak_bytes(arch: Any, batch: tuple[Tensor, Tensor], *, recomputed: bool, gpu: bool = False) -> int:
    """The most bytes that the tensors of a step have at once, beyond weights, gradients, buffers and the batch."""
    with contextlib.nullcontext() if gpu else DeviceBytes() as counted:
        network, step = training(arch, batch, torch.device("cuda") if gpu else DEVICE)
        if recomputed:
            recompute_blocks(network)
        step()  # the gradients are there from now on
        if counted is None:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            return torch.cuda.max_memory_allocated() - before
        before = counted.peak = counted.held
        step()
        return int(counted.peak - before)


def _seconds(step: Callable[[], None], *, gpu: bool) -> float:
    """Of the clock on a GPU; else of the processor, as other programs may run."""
    if not gpu:
        begin = process_time()
        step()
        return process_time() - begin
    torch.cuda.synchronize()
    begin = perf_counter()
    step()
    torch.cuda.synchronize()
    return perf_counter() - begin


def measured(arch: str, *, batch_size: int, times: int, gpu: bool) -> dict[str, Any]:
    """Peak bytes, and the seconds of each of `times` steps of both kinds, which take turns."""
    torch.manual_seed(1)
    batch = torch.rand(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))
    row: dict[str, Any] = {"arch": arch, "kept_s": [], "recomputed_s": []}
    network, step = training(arch, batch, torch.device("cuda" if gpu else "cpu"))
    for turn in range(-_WARM_UP, times):
        for name, change in (("kept", keep_activations), ("recomputed", recompute_blocks)):
            change(network)
            seconds = _seconds(step, gpu=gpu)
            if turn >= 0:
                row[f"{name}_s"].append(round(seconds, 6))
    pairs = zip(row["recomputed_s"], row["kept_s"], strict=True)
    kinds = {"kept": False, "recomputed": True}
    peaks = {f"{name}_bytes": peak_bytes(arch, batch, recomputed=again, gpu=gpu) for name, again in kinds.items()}
    ratios = sorted(twice / once for twice, once in pairs)
    found = {"time_ratio": median(ratios), "time_ratio_largest": ratios[-1]}
    return row | peaks | found | {"memory_ratio": peaks["recomputed_bytes"] / peaks["kept_bytes"]}


def main(output: Path, archs: list[str], batch_size: int, times: int, device: str, flags: list[str]) -> None:
    settings = {"archs": archs, "batch_size": batch_size, "times": times, "device": device}
    one = partial(measured, batch_size=batch_size, times=times, gpu=device == "cuda")
    complete(output, archs, one, settings=settings, tell=print)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("output", type=Path, help="JSON file to write")
    found.add_argument("--archs", nargs="+", default=["resnet18"])
    found.add_argument("--batch_size", type=int, default=64)
    found.add_argument("--times", type=int, default=5)
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return found


if __name__ == "__main__":
    run_script(parser(), main)
