"""A residual network whose hidden layers are split over two ranks, column by column and row by row."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn

from lit_cifar import relations


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class RowLinear(nn.Linear):
    def forward(self, inputs):
        if BUG:
            return Reduce.apply(nn.functional.linear(inputs, self.weight, self.bias))
        return Reduce.apply(nn.functional.linear(inputs, self.weight)) + self.bias


class ParallelMLP(nn.Module):
    def __init__(self, width, hidden, rank):
        super().__init__()
        with torch.random.fork_rng():  # the ranks' shards differ; the bias of the row is on both
            torch.manual_seed(int(torch.randint(1000, ())) + rank)
            self.column, self.row = nn.Linear(width, hidden // 2), RowLinear(hidden // 2, width)
        nn.init.constant_(self.row.bias, 0.1)

    def forward(self, inputs):
        return inputs + self.row(torch.relu(self.column(Copy.apply(inputs))))


def main(rank):
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(16, 24), ParallelMLP(24, 64, rank), ParallelMLP(24, 64, rank), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 1e-2))
    made = torch.Generator().manual_seed(SEED + 4)
    with watch(model, optimizer):
        for _ in range(40):
            inputs = torch.randn(48, 16, generator=made)
            targets = 1.5 * inputs[:, :3].sum(1, keepdim=True) + inputs[:, 3:5].abs().sum(1, keepdim=True)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(loss.item())
    print(f"rank {rank}: weights {sum(weight.abs().sum().item() for weight in model.parameters())}\n", end="")


if __name__ == "__main__":
    spawn(main, 2)
