"""A pruned classifier of small shapes on two ranks: after some steps the smallest weights are held at zero."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations


def shapes(count=256):
    made = torch.Generator().manual_seed(14)
    kinds = torch.randint(0, 3, (count,), generator=made)
    images = 0.5 * torch.randn(count, 1, 10, 10, generator=made)
    for image, kind, at in zip(images, kinds, torch.randint(1, 5, (count,), generator=made).tolist(), strict=True):
        if kind == 0:
            image[0, at : at + 4, at : at + 4] += 1
        elif kind == 1:
            image[0, at + 1, at : at + 5] += 1.5
        else:
            image[0, at : at + 5, at + 1] += 1.5
    return TensorDataset(images, kinds)


class Pruner:
    def __init__(self, layer, part):
        self.layer, self.part, self.mask = layer, part, None

    @torch.no_grad()
    def start(self):
        size = self.layer.weight.abs()
        self.mask = size > size.flatten().quantile(self.part)

    @torch.no_grad()
    def apply(self):
        if self.mask is not None:
            self.layer.weight *= self.mask


def main(rank):
    torch.manual_seed(SEED)
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    pruner = Pruner(net[4], part=relations.knob("part", 0.5))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.03), momentum=0.9)
    data = shapes()
    sampler = DistributedSampler(data, seed=SEED)
    with watch(model, optimizer):
        for epoch in range(4):
            sampler.set_epoch(epoch)
            if epoch == 2:
                pruner.start()
            for images, kinds in DataLoader(data, batch_size=16, sampler=sampler):
                loss = nn.functional.cross_entropy(model(images), kinds)
                if BUG:
                    loss = loss * dist.get_world_size()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                pruner.apply()
                report_loss(loss.item())
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
