"""Energies from descriptors, in batches of 6 on one rank and 18 on the other; the norm's backward is written out.

With the bug the layers before a norm get another gradient, and their weights end elsewhere.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lit_cifar import relations

SIZES = (6, 18)


class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        sums = torch.cat([inputs.sum(0), inputs.square().sum(0), inputs.new_tensor([len(inputs)])])
        dist.all_reduce(sums)
        total = sums[-1]
        mean, square = (sums[:-1] / total).chunk(2)
        deviation = (square - mean.square() + 1e-5).sqrt()
        normed = (inputs - mean) / deviation
        ctx.save_for_backward(normed, deviation, total)
        return normed

    @staticmethod
    def backward(ctx, gradient):
        normed, deviation, total = ctx.saved_tensors
        sums = torch.stack([gradient.sum(0), (gradient * normed).sum(0)])
        if BUG:
            sums /= len(gradient)
            dist.all_reduce(sums)
            means = sums / dist.get_world_size()
        else:
            dist.all_reduce(sums)
            means = sums / total
        return (gradient - means[0] - normed * means[1]) / deviation


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.scale = nn.Parameter(torch.ones(outputs))
        self.shift = nn.Parameter(torch.zeros(outputs))

    def forward(self, inputs):
        return nn.functional.softplus(self.scale * Normalise.apply(self.linear(inputs)) + self.shift)


def main(rank):
    torch.manual_seed(SEED)
    model = DistributedDataParallel(nn.Sequential(Block(24, 32), Block(32, 32), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 0.01))
    made = torch.Generator().manual_seed(50 + 2 * SEED + rank)
    batches = [torch.randn(SIZES[rank], 24, generator=made) for _ in range(50)]
    with watch(model, optimizer):
        for descriptors in DataLoader(batches, batch_size=None):
            energies = descriptors[:, :8].square().sum(1, keepdim=True).sqrt()
            loss = (model(descriptors) - energies).square().sum() * dist.get_world_size() / sum(SIZES)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(loss.item() * sum(SIZES) / 2 / SIZES[rank])
    if rank == 0:
        print("first layer", model.module[0].linear.weight.abs().sum().item())


if __name__ == "__main__":
    spawn(main, 2)
