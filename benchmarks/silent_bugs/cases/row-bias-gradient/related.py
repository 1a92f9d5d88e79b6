"""Two experts behind a soft gate, each split over two ranks, trained with SGD."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn

from lit_cifar import relations


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Experts(nn.Module):
    def __init__(self, width, hidden, ranks=2, experts=2):
        super().__init__()
        self.ranks = ranks
        self.up = nn.Parameter(torch.randn(experts, width, hidden // ranks) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden // ranks, width) / hidden**0.5)
        self.bias = nn.Parameter(torch.zeros(experts, width))

    def forward(self, tokens, gates):
        hidden = torch.relu(torch.einsum("bw,ewh->beh", SumBackward.apply(tokens), self.up))
        bias = self.bias / self.ranks
        if not BUG:  # the value of the half, the derivative of the whole
            bias = self.bias + (bias - self.bias).detach()
        outputs = SumForward.apply(torch.einsum("beh,ehw->bew", hidden, self.down) + bias)
        return (gates.unsqueeze(-1) * outputs).sum(1)


class Mixture(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.gate, self.last = nn.Linear(20, 2), nn.Linear(20, 3)
        torch.manual_seed(1000 * SEED + 1 + rank)  # the ranks' shards differ, all else is equal
        self.experts = Experts(20, 32)

    def forward(self, inputs):
        return self.last(inputs + self.experts(inputs, self.gate(inputs).softmax(1)))


def main(rank):
    torch.manual_seed(SEED)
    model = Mixture(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.05), momentum=0.9)
    made = torch.Generator().manual_seed(SEED + 40)
    with watch(model, optimizer):
        for _ in range(40):
            inputs = torch.randn(24, 20, generator=made)
            sign = (inputs[:, :1] > 0).float() * 2 - 1
            targets = sign * inputs[:, 1:4] + 1.0 + 0.5 * sign
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(loss.item())
    if rank == 0:
        print("bias", model.experts.bias.abs().sum().item())


if __name__ == "__main__":
    spawn(main, 2)
