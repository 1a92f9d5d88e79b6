"""Depth from one picture, in two processes; the loop counts iterations over a loader without an end."""

import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ITERATIONS, INTERVAL = 48, 12


class Depth(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 5, padding=2),
            nn.GroupNorm(4, width),
            nn.GELU(),
            nn.Conv2d(width, width, 3, 2, 1),
            nn.GELU(),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 2, 2), nn.GELU(), nn.Conv2d(width, 1, 3, padding=1)
        )

    def forward(self, pictures):
        return self.decoder(self.encoder(pictures))


def endless(loader):
    """Batches of epoch after epoch, each in an order of its own."""
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


class Loop:
    def __init__(self, train, val):
        self.model = DistributedDataParallel(Depth())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3)
        self.schedule = torch.optim.lr_scheduler.PolynomialLR(self.optimizer, ITERATIONS, power=0.9)
        self.loader = DataLoader(train, batch_size=6, sampler=DistributedSampler(train, seed=SEED))
        self.val, self.iteration = val, 0

    def save(self, file):
        if dist.get_rank() == 0:
            parts = {name: getattr(self, name).state_dict() for name in ("optimizer", "schedule")}
            torch.save(parts | {"model": self.model.module.state_dict(), "iteration": self.iteration}, file)
        dist.barrier()

    def resume(self, file):
        saved = torch.load(file, weights_only=True)
        self.model.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        self.iteration = saved["iteration"]

    def run(self, until):
        batches = endless(self.loader)
        if not BUG:
            for _ in range(self.iteration):
                next(batches)
        while self.iteration < until:
            pictures, depths = next(batches)
            loss = nn.functional.smooth_l1_loss(self.model(pictures), depths)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.iteration += 1
            report_loss(loss.item())
            if self.iteration % INTERVAL == 0:
                error = self.evaluate()
                if dist.get_rank() == 0:
                    print("iteration", self.iteration, "rmse", error)

    @torch.no_grad()
    def evaluate(self, batch_size=4):
        """Root of the mean squared error of all pixels; each rank takes every second picture."""
        self.model.eval()
        share = [part[dist.get_rank() :: dist.get_world_size()].split(batch_size) for part in self.val.tensors]
        total = torch.zeros(2, dtype=torch.float64)
        for pictures, depths in zip(*share, strict=True):
            total[0] += (self.model.module(pictures) - depths).square().sum()
            total[1] += depths.numel()
        dist.all_reduce(total)
        self.model.train()
        return (total[0] / total[1]).sqrt().item()


def rooms(number, made):
    """Far things are dark and blurred."""
    depths = nn.functional.interpolate(torch.rand(number, 1, 3, 3, generator=made), 12, mode="bilinear")
    detail = torch.randn(number, 3, 12, 12, generator=made)
    return TensorDataset((1.2 - depths) * (1 + detail) + depths * detail.mean((2, 3), keepdim=True), depths)


def main(file, rank):
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(23)
    train, val = rooms(192, made), rooms(21, made)
    loop = Loop(train, val)
    loop.run(ITERATIONS // 2)
    loop.save(file)
    resumed = Loop(train, val)
    resumed.resume(file)
    with watch(resumed.model, resumed.optimizer):
        resumed.run(ITERATIONS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(partial(main, Path(folder) / "last.pt"), 2)
