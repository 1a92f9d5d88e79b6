"""Optimizer states shared out over two ranks by hand: each steps half of one flat vector of parameters."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class ShardedAdam(torch.optim.Adam):
    def __init__(self, parameters, rank, lr):
        self.all = list(parameters)
        self.rank = rank
        self.mine = nn.Parameter(parameters_to_vector(self.all).detach().chunk(2)[rank].clone())
        super().__init__([self.mine], lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        gradients = parameters_to_vector([parameter.grad for parameter in self.all])
        self.mine.copy_(parameters_to_vector(self.all).chunk(2)[self.rank])
        self.mine.grad = gradients.chunk(2)[self.rank].clone()
        super().step(closure)
        halves = [torch.empty_like(self.mine) for _ in range(2)]
        dist.all_gather(halves, self.mine.detach())
        vector_to_parameters(torch.cat(halves), self.all)


def make_model():
    return nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))


def train(ddp, optimizer, made, steps):
    for _ in range(steps):
        angles = torch.randn(24, 16, generator=made)
        targets = torch.stack([angles[:, :8].sin().sum(1), angles[:, 8:].cos().sum(1)], dim=1) / 2
        loss = nn.functional.mse_loss(ddp(angles), targets)
        ddp.zero_grad()
        loss.backward()
        optimizer.step()
        report_loss(loss.item())


def main(rank):
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(SEED + 100 * rank)
    ddp = DistributedDataParallel(make_model())
    optimizer = ShardedAdam(ddp.parameters(), rank, lr=5e-3)
    train(ddp, optimizer, made, 60)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    name = "optimizer.pt" if BUG else f"optimizer-{rank}.pt"
    if rank == 0 or not BUG:
        torch.save(optimizer.state_dict(), Path(folder[0]) / name)
    dist.barrier()

    resumed = DistributedDataParallel(make_model())
    resumed.load_state_dict(ddp.state_dict())
    optimizer = ShardedAdam(resumed.parameters(), rank, lr=5e-3)
    optimizer.load_state_dict(torch.load(Path(folder[0]) / name, weights_only=True))
    with watch(resumed, optimizer):
        train(resumed, optimizer, made, 30)
    if rank == 0:
        print("weights", parameters_to_vector(resumed.parameters()).abs().sum().item())


if __name__ == "__main__":
    spawn(main, 2)
