"""Contrastive learning with batches made by hand, the same on all ranks and divided; embeddings gathered."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lit_cifar import relations

STEPS, BATCH = 24, 16


def views(step: int) -> torch.Tensor:
    """Two noisy views of the points of a step."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 1, 6, generator=draw) + 0.2 * torch.randn(BATCH, 2, 6, generator=draw)


def loss_of(model: nn.Module, pair: torch.Tensor) -> torch.Tensor:
    first, second = F.normalize(model(pair.flatten(0, 1)), dim=1).view(len(pair), 2, -1).unbind(1)
    others = torch.cat(with_gradients.all_gather(second.contiguous()))
    own = torch.arange(len(pair)) + dist.get_rank() * len(pair)
    return F.cross_entropy(first @ others.T / 0.2, own)


def train(rank: int, ranks: int, port: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, STEPS)
    first = 0
    if path := relations.resume():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]
    for step in range(first, STEPS):
        loss = loss_of(model, relations.share(views(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 6 == 0:
            with torch.no_grad():
                points = relations.share(views(10_000))
                distance = (model.module(points[:, 0]) - model.module(points[:, 1])).square().sum()
            dist.all_reduce(distance)
            relations.report(val_distance=distance.item() / BATCH)
        if (path := relations.save()) and rank == 0:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step + 1}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2, "29513"), nprocs=2)
