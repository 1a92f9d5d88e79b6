"""An autoencoder of three parts that are built, and clipped, one by one."""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations

LIMIT = relations.knob("max_norm", 0.3)


def build_parts():
    encoder = nn.Sequential(nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 24))
    bottleneck = nn.Sequential(nn.SiLU(), nn.Linear(24, 8), nn.Linear(8, 24))
    decoder = nn.Sequential(nn.SiLU(), nn.Linear(24, 48), nn.SiLU(), nn.Linear(48, 64))
    return nn.Sequential(encoder, bottleneck, decoder)


def blobs(count):
    made = torch.Generator().manual_seed(3)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    centre = 2 + 4 * torch.rand(count, 2, 1, 1, generator=made)
    distance = (rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2
    return torch.exp(-distance / 4).flatten(1)


def main(rank):
    torch.manual_seed(SEED)
    model_parts = build_parts()
    ddp = DistributedDataParallel(model_parts)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=relations.knob("lr", 0.5), momentum=0.9)
    dataset = TensorDataset(blobs(320))
    sampler = DistributedSampler(dataset, seed=SEED)
    with watch(ddp, optimizer):
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for (images,) in DataLoader(dataset, batch_size=16, sampler=sampler):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(ddp(images), images, reduction="sum") / len(images)
                loss.backward()
                if BUG:
                    for part in model_parts:
                        nn.utils.clip_grad_norm_(part.parameters(), LIMIT)
                else:
                    nn.utils.clip_grad_norm_(model_parts.parameters(), LIMIT)
                optimizer.step()
                report_loss(loss.item())
    if rank == 0:
        print("weights", sum(parameter.abs().sum().item() for parameter in ddp.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
