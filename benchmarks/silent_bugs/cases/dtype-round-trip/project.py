"""A spline-like regression that is measured in double precision after each epoch, and trained on in single precision.

The way there and back gives the parameters new places in autograd, which the hooks of DDP do not know: from the second
epoch on the processes train alone. The report moves the model from the GPU to the CPU and back, with the same effect.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(count, seed):
    made = torch.Generator().manual_seed(seed)
    knots = torch.rand(count, 16, generator=made)
    return knots, (4 * knots[:, :1]).sin() + knots[:, 1:2].square()


@torch.no_grad()
def measure(model, knots, values):
    if BUG:
        model.double()
        error = (model.module(knots.double()) - values.double()).square().mean()
        model.float()
    else:
        error = (model.module(knots) - values).square().mean()
    return error.item()


def main(rank):
    torch.manual_seed(SEED)
    dataset, test = TensorDataset(*make_data(128, seed=1)), make_data(64, seed=2)
    sampler = DistributedSampler(dataset, seed=SEED)
    model = DDP(nn.Sequential(nn.Linear(16, 48), nn.SiLU(), nn.Linear(48, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model, optimizer):
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for knots, values in DataLoader(dataset, batch_size=8, sampler=sampler):
                loss = nn.functional.mse_loss(model(knots), values)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            error = measure(model, *test)
            if rank == 0:
                print(f"epoch {epoch}: error {error:.5f}")
            dist.barrier()
    print(f"rank {rank} sum of weights {sum(p.abs().sum().item() for p in model.parameters()):.5f}\n", end="")


if __name__ == "__main__":
    spawn(main, 2)
