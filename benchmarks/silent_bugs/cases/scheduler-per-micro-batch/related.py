"""A small convolutional network with accumulated gradients whose schedule is counted in steps of the optimizer.

The scheduler also steps after each micro-batch, so the learning rate has decayed after a quarter of the run.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations

ACCUMULATE = relations.knob("accumulate", 4)
EPOCHS = 4


class PolynomialDecay:
    def __init__(self, optimizer, total_steps, power=2):
        self.optimizer, self.total_steps, self.power = optimizer, total_steps, power
        self.base, self.count = optimizer.param_groups[0]["lr"], 0

    def step(self):
        self.count += 1
        left = max(0, 1 - self.count / self.total_steps)
        self.optimizer.param_groups[0]["lr"] = self.base * left**self.power


def make_clips():
    made = torch.Generator().manual_seed(61)
    clips = torch.randn(192, 3, 6, 6, generator=made)
    return TensorDataset(clips, clips[:, :, 2:4, 2:4].mean((2, 3)).argmax(1))


def main(rank):
    torch.manual_seed(SEED)
    clips = make_clips()
    sampler = DistributedSampler(clips, seed=SEED)
    loader = DataLoader(clips, batch_size=4, sampler=sampler)
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.Flatten(), nn.Linear(432, 3)
    )
    model = DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.1), momentum=0.9)
    lr_scheduler = PolynomialDecay(opt, EPOCHS * len(loader) // ACCUMULATE)
    with watch(model, opt):
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for number, (inputs, labels) in enumerate(loader, 1):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                scaled_loss = loss / ACCUMULATE
                if number % ACCUMULATE:
                    with model.no_sync():
                        scaled_loss.backward()
                else:
                    scaled_loss.backward()
                    opt.step()
                    opt.zero_grad()
                    if not BUG:
                        lr_scheduler.step()
                if BUG:
                    lr_scheduler.step()
                report_loss(loss.item())
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
