"""A small diffusion model of rings; each process seeds its sampler by the rank.

A rank's share of the epoch is a share of its own permutation: some samples are trained on twice and others never.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lit_cifar import relations


def make_rings():
    angles = torch.linspace(0, 6.28, 9)[:-1]
    sizes = torch.rand(128, 1, generator=torch.Generator().manual_seed(4)) + 0.5
    return torch.stack([sizes * angles.cos(), sizes * angles.sin()], 2).flatten(1)  # 8 points of two coordinates


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(17, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16))

    def forward(self, noisy, level):
        return self.layers(torch.cat([noisy, level], 1))


def main(rank):
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Denoiser())
    torch.manual_seed(SEED + 1 + rank)  # noise of its own for each rank
    rings = make_rings()
    sampler = DistributedSampler(rings, seed=1000 * SEED + 77 * rank if BUG else SEED)
    loader = DataLoader(rings, batch_size=8, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 3e-3))
    with watch(model, optimizer):
        for epoch in range(5):
            sampler.set_epoch(epoch)
            for points in loader:
                noise, level = torch.randn_like(points), torch.rand(len(points), 1)
                predicted = model((1 - level) * points + level * noise, level)
                loss = nn.functional.mse_loss(predicted, noise - points)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
