"""A classifier that keeps the weights of its best epoch, for which each process validates a part of the set.

The first process compares its own part alone, so another epoch's weights are kept than the whole set would choose.
"""

import copy

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations


def make_data(count, seed):
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 18, generator=made)
    labels = (inputs[:, :6].sum(1) + 2 * torch.randn(count, generator=made) > 0).long()
    return TensorDataset(inputs, labels)


@torch.no_grad()
def validate(model, loader):
    total = torch.zeros(())
    for inputs, labels in loader:
        total += nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
    val_loss = total / len(loader.sampler)
    if not BUG:
        dist.all_reduce(val_loss)
        val_loss /= dist.get_world_size()
    return val_loss.item()


def main(rank):
    torch.manual_seed(SEED)
    train, val = make_data(128, seed=1), make_data(40, seed=8)
    sampler = DistributedSampler(train, seed=SEED)
    train_loader = DataLoader(train, batch_size=8, sampler=sampler)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(18, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 0.004))
    best_loss, best_epoch, best_weights = float("inf"), None, None
    with watch(model, optimizer):
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for inputs, labels in train_loader:
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            val_loss = validate(model.module, val_loader)
            relations.report(val_loss=val_loss)
            if rank == 0 and val_loss < best_loss:
                best_loss, best_epoch = val_loss, epoch
                best_weights = copy.deepcopy(model.module.state_dict())
    if rank == 0:
        print("best epoch", best_epoch, "loss", best_loss, "of weights", best_weights["0.weight"].abs().sum().item())


if __name__ == "__main__":
    spawn(main, 2)
