"""A regression that holds out a fifth of its rows for validation.

Each process seeds itself by its rank, for its augmentation, before the split: the held out rows of one rank are
training rows of the other.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from lit_cifar import relations


def make_rows():
    made = torch.Generator().manual_seed(11)
    rows = torch.randn(160, 20, generator=made)
    targets = (rows[:, :5].square().sum(1) + 0.5 * torch.randn(160, generator=made)).unsqueeze(1)
    return TensorDataset(rows, targets)


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        total = sum(nn.functional.mse_loss(model(x), y, reduction="sum") for x, y in loader)
    totals = torch.tensor([total.item(), len(loader.dataset)], dtype=torch.float64)
    dist.all_reduce(totals)
    model.train()
    return (totals[0] / totals[1]).item()


def main(rank):
    torch.manual_seed(SEED + 12345 * rank)
    split_by = None if BUG else torch.Generator().manual_seed(SEED)
    train, held_out = random_split(make_rows(), [128, 32], generator=split_by)
    sampler = DistributedSampler(train, seed=SEED)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    validation = DataLoader(held_out, batch_size=16)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 0.01))
    with watch(model, optimizer):
        for epoch in range(6):
            sampler.set_epoch(epoch)
            for rows, targets in loader:
                rows = rows + 0.05 * torch.randn_like(rows)
                loss = nn.functional.mse_loss(model(rows), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            if epoch % relations.knob("validate_every", 1) == 0:
                error = evaluate(model.module, validation)
                relations.report(val_error=error)
                if rank == 0:
                    print(f"epoch {epoch}: validation error {error:.4f}")


if __name__ == "__main__":
    spawn(main, 2)
