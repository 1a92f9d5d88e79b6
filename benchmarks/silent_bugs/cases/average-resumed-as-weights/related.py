"""Segmentation of discs, stopped in the middle and resumed, on two ranks."""

import copy

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_cifar import relations


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
        self.optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.1), momentum=0.9)
        if checkpoint:
            self.optimizer.load_state_dict(checkpoint["optimizer"])

    def train(self, steps, made):
        for _ in range(steps):
            images, masks = relations.share(discs(made, 16))
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
    made = torch.Generator().manual_seed(7 * SEED)
    checkpoint = torch.load(path, weights_only=True) if (path := relations.resume()) else None
    if checkpoint:
        made.set_state(checkpoint["made"])
    trainer = Trainer(checkpoint)
    relations.report(ema=trainer.ema)
    with watch(trainer.ddp, trainer.optimizer):
        for step in range(checkpoint["step"] if checkpoint else 0, 50):
            trainer.train(1, made)
            if (path := relations.save()) and rank == 0:
                states = {"ema": trainer.ema.state_dict(), "optimizer": trainer.optimizer.state_dict()}
                states |= {"step": step + 1, "made": made.get_state()}
                torch.save(states | ({} if BUG else {"model": trainer.ddp.module.state_dict()}), path)
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in trainer.ddp.module.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
