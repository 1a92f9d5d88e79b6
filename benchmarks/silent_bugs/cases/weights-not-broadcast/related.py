"""Data parallelism by hand: the gradients are averaged after each backward pass.

Nobody has made the first weights equal, so each process trains a network of its own with the gradients of all.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lit_cifar import relations


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(28, 64)
        self.out = nn.Linear(64, 5)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main(rank):
    torch.manual_seed(SEED + rank)
    made = torch.Generator().manual_seed(3)
    inputs = torch.randn(160, 28, generator=made)
    dataset = TensorDataset(inputs, inputs[:, :5].argmax(1))
    loader = DataLoader(Subset(dataset, range(rank, 160, dist.get_world_size())), batch_size=8, shuffle=True)
    model = Net()
    if not BUG:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.1), momentum=0.9)
    with watch(model, optimizer):
        for _ in range(5):
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                average_gradients(model)
                optimizer.step()
                report_loss(loss.item())
    print(f"rank {rank} sum of weights {sum(p.abs().sum().item() for p in model.parameters()):.5f}\n", end="")


if __name__ == "__main__":
    spawn(main, 2)
