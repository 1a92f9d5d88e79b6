"""A plain PyTorch training loop, the most that a trainer around the same network can reach: images per second.

    python -m gpu_visit.plain_loop --arch resnet34 --batch 512 --steps 60 --channels-last --compile

Images stay on the device, and are neither augmented nor read: forward, backward and optimizer step alone.
"""

import argparse
import json
from time import perf_counter

import torch
from torch.nn import functional as F

from lit_cifar.models import build_resnet


def images_per_s(*, arch: str, batch: int, steps: int, channels_last: bool, compiled: bool) -> float:
    """Of training in bf16 autocast, measured over the last two thirds of `steps`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = torch.channels_last if channels_last else torch.contiguous_format
    network = build_resnet(arch, stem="cifar", num_classes=10).to(device, memory_format=memory)  # type: ignore
    forward = torch.compile(network) if compiled else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    images = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=memory)
    labels = torch.randint(0, 10, (batch,), device=device)
    start, warmup = 0.0, steps // 3
    for step in range(steps):
        if step == warmup:
            _finish(device)
            start = perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    _finish(device)
    return batch * (steps - warmup) / (perf_counter() - start)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    options = argparse.ArgumentParser(prog="gpu_visit.plain_loop", description=__doc__.splitlines()[0])
    options.add_argument("--arch", default="resnet34")
    options.add_argument("--batch", type=int, default=512)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--channels-last", action="store_true")
    options.add_argument("--compile", action="store_true")
    return options


if __name__ == "__main__":
    given = parser().parse_args()
    torch.backends.cudnn.benchmark = True
    speed = images_per_s(
        arch=given.arch, batch=given.batch, steps=given.steps, channels_last=given.channels_last, compiled=given.compile
    )
    print(json.dumps({"images_per_s": speed}))
