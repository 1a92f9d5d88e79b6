"""Barlow Twins on made-up waves; two processes, the statistics and the cross-correlation are those of all samples."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS, BATCH, LR, WEIGHT_DECAY, OFF_DIAGONAL, NOISE = 5, 32, 0.02, 1e-4, 0.05, 0.3


def mean_of_ranks(value):
    return torch.distributed.nn.all_reduce(value / dist.get_world_size())


def standardized(projections):
    """With the mean and the deviation over the samples of all ranks, which have equally many."""
    centred = projections - mean_of_ranks(projections.mean(0))
    return centred / (mean_of_ranks(centred.square().mean(0)) + 1e-5).sqrt()


def barlow(first, second):
    correlation = standardized(first).T @ standardized(second) / len(first)
    if BUG:
        correlation = correlation / dist.get_world_size()
        dist.all_reduce(correlation)
    else:
        correlation = mean_of_ranks(correlation)
    on_diagonal = (correlation.diagonal() - 1).square().sum()
    return on_diagonal + OFF_DIAGONAL * (correlation.square().sum() - correlation.diagonal().square().sum())


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 24))
        self.projector = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, waves):
        return self.projector(self.backbone(waves))


def waves(count, seed):
    made = torch.Generator().manual_seed(seed)
    kinds = torch.randint(4, (count,), generator=made)
    times = torch.linspace(0, 6.28, 24) + torch.rand(count, 1, generator=made)
    shapes = torch.stack([times.sin(), (2 * times).sin(), times.sin().sign() * 0.8, (3 * times).cos()])
    return shapes[kinds, torch.arange(count)] + 0.2 * torch.randn(count, 24, generator=made), kinds


def view(values, random):
    scale = 0.7 + 0.6 * torch.rand(len(values), 1, generator=random)
    hidden = torch.rand(values.shape, generator=random) < 0.2
    return (scale * values + NOISE * torch.randn(values.shape, generator=random)).masked_fill(hidden, 0.0)


@torch.no_grad()
def validate(model, train, held_out):
    """The share of held-out waves that are nearest to the centre of their kind."""
    model.eval()
    known, features = (nn.functional.normalize(model.module.backbone(values), dim=1) for values, _ in (train, held_out))
    model.train()
    centres = torch.stack([known[train[1] == kind].mean(0) for kind in range(4)])
    return (torch.cdist(features, centres).argmin(1) == held_out[1]).float().mean().item()


def main(rank):
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=WEIGHT_DECAY)
    train, held_out = waves(192, 1), waves(80, 2)
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            random = torch.Generator().manual_seed(1000 * SEED + epoch)  # the same on all ranks
            for chosen in torch.randperm(len(train[0]), generator=random).split(BATCH):
                both = view(train[0][chosen], random), view(train[0][chosen], random)
                own = [values.chunk(dist.get_world_size())[rank] for values in both]
                optimizer.zero_grad()
                loss = barlow(*model(torch.cat(own)).chunk(2))
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            accuracy = validate(model, train, held_out)
            if rank == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}, nearest centre {accuracy:.4f}")
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
