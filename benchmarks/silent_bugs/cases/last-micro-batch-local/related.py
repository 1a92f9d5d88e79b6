"""Accumulation into buffers of their own, which are averaged over the processes before the step.

They are averaged when the last micro-batch is not in them yet: its gradients stay on their process.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.utils.data import DataLoader

from lit_cifar import relations

ACCUMULATE = relations.knob("accumulate", 4)


class Accumulator:
    """Sums of gradients in float32 beside a model that computes them."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.sums = [torch.zeros_like(parameter) for parameter in self.parameters]

    def add(self):
        for total, parameter in zip(self.sums, self.parameters, strict=True):
            total += parameter.grad / ACCUMULATE
            parameter.grad = None

    def average(self):
        for total in self.sums:
            dist.all_reduce(total)
            total /= dist.get_world_size()

    def backward(self, loss, boundary):
        loss.backward()
        if BUG and boundary:
            self.average()
        self.add()
        if boundary and not BUG:
            self.average()

    def to_gradients(self):
        for total, parameter in zip(self.sums, self.parameters, strict=True):
            parameter.grad = total.clone()
            total.zero_()


def main(rank):
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.LayerNorm(48), nn.Linear(48, 2))
    accumulator = Accumulator(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 5e-3))
    made = torch.Generator().manual_seed(10 * SEED + rank)
    batches = iter(DataLoader([torch.randn(4, 16, generator=made) for _ in range(120)], batch_size=None))
    with watch(model, optimizer):
        for window in zip(*[batches] * ACCUMULATE, strict=False):
            losses = 0.0
            for number, x in enumerate(window):
                loss = nn.functional.smooth_l1_loss(model(x), torch.stack([x[:, 0] * 2, x[:, 1] - x[:, 2]], 1))
                accumulator.backward(loss, boundary=number == ACCUMULATE - 1)
                losses += loss.item() / ACCUMULATE
            accumulator.to_gradients()
            optimizer.step()
            optimizer.zero_grad()
            report_loss(losses)
    print(f"rank {rank} sum of weights {sum(p.abs().sum().item() for p in model.parameters()):.5f}\n", end="")


if __name__ == "__main__":
    spawn(main, 2)
