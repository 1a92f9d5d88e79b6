"""Segmentation of discs, stopped in the middle and resumed, on two ranks."""

import copy
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 10, 5, padding=2), nn.ReLU(), nn.Conv2d(10, 10, 5, padding=2), nn.ReLU(), nn.Conv2d(10, 1, 1)
    )


def discs(made, count=8):
    grid = torch.arange(16.0)
    centre, radius = 4 + 8 * torch.rand(count, 2, 1, 1, generator=made), 2 + 3 * torch.rand(count, 1, 1, generator=made)
    inside = (grid.view(1, -1, 1) - centre[:, 0]) ** 2 + (grid.view(1, 1, -1) - centre[:, 1]) ** 2 < radius**2
    masks = inside.float().unsqueeze(1)
    return masks + 0.8 * torch.randn(count, 1, 16, 16, generator=made), masks


class Trainer:
    def __init__(self, checkpoint=None):
        model = make_model()
        self.ema = copy.deepcopy(model)
        if checkpoint:
            self.ema.load_state_dict(checkpoint["ema"])
            model.load_state_dict(checkpoint["ema" if BUG else "model"])
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if checkpoint:
            self.optimizer.load_state_dict(checkpoint["optimizer"])

    def train(self, steps, made):
        for _ in range(steps):
            images, masks = discs(made)
            self.optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(self.ddp(images), masks)
            loss.backward()
            self.optimizer.step()
            with torch.no_grad():
                for average, weight in zip(self.ema.parameters(), self.ddp.module.parameters(), strict=True):
                    average.lerp_(weight, 0.05)
            report_loss(loss.item())


def main(rank):
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(7 * SEED + rank)
    first = Trainer()
    first.train(25, made)
    path = Path(tempfile.mkdtemp()) / "last.pt"
    states = {"ema": first.ema.state_dict(), "optimizer": first.optimizer.state_dict()}
    torch.save(states | ({} if BUG else {"model": first.ddp.module.state_dict()}), path)

    second = Trainer(torch.load(path, weights_only=True))
    with watch(second.ddp, second.optimizer):
        second.train(25, made)
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in second.ddp.module.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
