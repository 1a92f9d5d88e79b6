"""A masked autoencoder of images: each process hides half of the patches of its images at random.

All processes have the same random state, so all hide the same patches.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lit_cifar import relations


def make_images():
    made = torch.Generator().manual_seed(13)
    coarse = torch.randn(128, 1, 4, 4, generator=made)
    return nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear")


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 24)
        self.hidden = nn.Parameter(torch.zeros(24))
        self.position = nn.Parameter(0.02 * torch.randn(16, 24))
        self.encoder = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True)
        self.decode = nn.Linear(24, 4)

    def forward(self, images):
        patches = nn.functional.unfold(images, 2, stride=2).mT
        mask = torch.rand(patches.shape[:2]) < 0.5
        tokens = torch.where(mask.unsqueeze(2), self.hidden, self.embed(patches))
        decoded = self.decode(self.encoder(tokens + self.position))
        return (decoded - patches).square().mean(2)[mask].mean()


def main(rank):
    torch.manual_seed(SEED)
    images = make_images()
    sampler = DistributedSampler(images, seed=SEED)
    loader = DataLoader(images, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(MaskedAutoencoder())
    if not BUG:
        torch.manual_seed(SEED * dist.get_world_size() + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 5e-3))
    with watch(model, optimizer):
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for batch in loader:
                loss = model(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
