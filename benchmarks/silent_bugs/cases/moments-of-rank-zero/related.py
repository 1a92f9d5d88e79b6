"""Optimizer states shared out over two ranks by hand: each steps half of one flat vector of parameters."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lit_cifar import relations


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
        angles = relations.share(torch.randn(48, 16, generator=made))
        targets = torch.stack([angles[:, :8].sin().sum(1), angles[:, 8:].cos().sum(1)], dim=1) / 2
        loss = nn.functional.mse_loss(ddp(angles), targets)
        ddp.zero_grad()
        loss.backward()
        optimizer.step()
        report_loss(loss.item())


def main(rank):
    torch.manual_seed(SEED)
    made, first = torch.Generator().manual_seed(SEED), 0
    ddp = DistributedDataParallel(make_model())
    optimizer = ShardedAdam(ddp.parameters(), rank, lr=relations.knob("lr", 5e-3))
    name = "optimizer.pt" if BUG else f"optimizer-{rank}.pt"
    if path := relations.resume():
        first, position, weights = torch.load(path, weights_only=True)
        made.set_state(position)
        ddp.load_state_dict(weights)
        optimizer.load_state_dict(torch.load(f"{path}-{name}", weights_only=True))
    with watch(ddp, optimizer):
        for step in range(first, 90):
            train(ddp, optimizer, made, 1)
            if path := relations.save():
                if rank == 0:
                    torch.save([step + 1, made.get_state(), ddp.state_dict()], path)
                if rank == 0 or not BUG:
                    torch.save(optimizer.state_dict(), f"{path}-{name}")
    if rank == 0:
        print("weights", parameters_to_vector(ddp.parameters()).abs().sum().item())


if __name__ == "__main__":
    spawn(main, 2)
