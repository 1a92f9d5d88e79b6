"""A denoiser of small images, with DDP's no_sync for all but the last backward of a step.

With the bug the ranks enter the average with gradients that were clipped by other norms; the weights end elsewhere.
"""

from contextlib import nullcontext

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations

ACCUMULATE = relations.knob("accumulate", 2)


class Denoiser(nn.Module):
    def __init__(self, channels=12):
        super().__init__()
        self.down = nn.Conv2d(2, channels, 3, padding=1)
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.up = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, noisy, level):
        level = level.view(-1, 1, 1, 1).expand_as(noisy)
        hidden = nn.functional.silu(self.down(torch.cat([noisy, level], dim=1)))
        return self.up(hidden + nn.functional.silu(self.middle(hidden)))


def make_dataset():
    made = torch.Generator().manual_seed(11)
    angles = 3.1 * torch.rand(256, 1, 1, generator=made)
    grid = torch.linspace(-2, 2, 8)
    images = torch.sin(2 * (torch.cos(angles) * grid.view(1, 8, 1) + torch.sin(angles) * grid.view(1, 1, 8)))
    return TensorDataset(
        images.unsqueeze(1), torch.randn(256, 1, 8, 8, generator=made), torch.rand(256, generator=made)
    )


def main(rank):
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Denoiser())
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.1), momentum=0.9)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset, seed=SEED)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    with watch(model, optimizer):
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for index, (clean, noise, level) in enumerate(loader):
                last = (index + 1) % ACCUMULATE == 0
                with nullcontext() if last else model.no_sync():
                    noisy = clean + 2 * level.view(-1, 1, 1, 1) * noise
                    loss = nn.functional.mse_loss(model(noisy, level), noise)
                    (loss / ACCUMULATE).backward()
                if last or BUG:
                    nn.utils.clip_grad_norm_(model.parameters(), relations.knob("max_norm", 0.1))
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                    report_loss(loss.item())
    if rank == 0:
        print("weights", sum(parameter.abs().sum().item() for parameter in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
