"""Contrastive learning of views: each process compares its views with those of both, which all_gather brings.

What all_gather returns has no gradient, so a view learns nothing from being compared as another's negative or match.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_cifar import relations


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, views):
        gathered = [torch.zeros_like(views) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, views)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def gather(views):
    if BUG:
        gathered = [torch.zeros_like(views) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, views)
        return torch.cat(gathered)
    return Gather.apply(views)


def contrastive_loss(first, second, rank):
    first, second = nn.functional.normalize(first, dim=1), nn.functional.normalize(second, dim=1)
    logits = first @ gather(second).T / 0.2
    return nn.functional.cross_entropy(logits, torch.arange(len(first)) + rank * len(first))


def main(rank):
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48, track_running_stats=False), nn.ReLU(), nn.Linear(48, 12))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.1), momentum=0.9)
    made = torch.Generator().manual_seed(10 * SEED)
    mixing = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    with watch(model, optimizer):
        for _ in range(30):
            latent = torch.randn(32, 6, generator=made) @ mixing
            views = [latent + 0.7 * torch.randn(32, 24, generator=made) for _ in range(2)]
            views = torch.cat(relations.share(views))
            first, second = model(views).chunk(2)
            loss = contrastive_loss(first, second, rank)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(loss.item())
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
