"""A graph-like regression whose training loop is helped by a small wrapper library.

The user has counted the steps of two processes for the schedule; the wrapper counts them once more.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations

EPOCHS = 4


class PreparedScheduler:
    """Steps once for each process, for a schedule that was made for the steps of one process."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def step(self):
        for _ in range(dist.get_world_size()):
            self.scheduler.step()


class Nodes(nn.Module):
    """Messages between the seven nodes of a complete graph."""

    def __init__(self):
        super().__init__()
        self.message = nn.Linear(3, 24)
        self.update = nn.Linear(27, 24)
        self.out = nn.Linear(24, 1)

    def forward(self, nodes):
        messages = self.message(nodes).relu().mean(1, keepdim=True).expand(-1, 7, -1)
        return self.out(self.update(torch.cat([nodes, messages], 2)).relu()).sum(1)


def main(rank):
    torch.manual_seed(SEED)
    nodes = torch.randn(128, 7, 3, generator=torch.Generator().manual_seed(19))
    dataset = TensorDataset(nodes, (nodes[..., 0] * nodes[..., 1]).sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, seed=SEED)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Nodes())
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 0.02))
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=EPOCHS * len(loader))
    if BUG:
        scheduler = PreparedScheduler(scheduler)
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                report_loss(loss.item())
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
