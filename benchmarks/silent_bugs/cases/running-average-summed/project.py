"""Two processes classify made-up pictures with an engine of their own, which shows a running average of its loss."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, CLASSES = 5, 16, 4
LR, MOMENTUM, WEIGHT_DECAY, ALPHA = 0.1, 0.9, 1e-4, 0.9


def pictures(count, seed):
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=made)
    x = torch.randn(count, 1, 8, 8, generator=made)
    for label in range(CLASSES):
        row, column = 4 * (label // 2), 4 * (label % 2)
        x[labels == label, :, row : row + 4, column : column + 4] += 0.6
    return TensorDataset(x, labels)


class RunningAverage:
    def __init__(self, alpha=ALPHA):
        self.alpha, self.value = alpha, None

    def started(self):
        self.value = None

    def iteration_completed(self, output):
        output = output.detach().clone()
        dist.all_reduce(output)
        if not BUG:
            output /= dist.get_world_size()
        self.value = output if self.value is None else self.alpha * self.value + (1 - self.alpha) * output


class Engine:
    def __init__(self, process, metrics=(), after_epoch=()):
        self.process, self.metrics, self.after_epoch, self.epoch = process, metrics, after_epoch, 0

    def run(self, loader, epochs):
        while self.epoch < epochs:
            loader.sampler.set_epoch(self.epoch)
            for metric in self.metrics:
                metric.started()
            for batch in loader:
                output = self.process(batch)
                for metric in self.metrics:
                    metric.iteration_completed(output)
            self.epoch += 1
            for handler in self.after_epoch:
                handler(self)


@torch.no_grad()
def accuracy(model, data, batch=10):
    model.eval()
    own = TensorDataset(*(part[dist.get_rank() :: dist.get_world_size()] for part in data.tensors))
    count = torch.zeros(2)
    for x, y in DataLoader(own, batch):
        count += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(count)
    model.train()
    return (count[0] / count[1]).item()


def main(rank):
    torch.manual_seed(SEED)
    train, test = pictures(128, 41), pictures(50, 42)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES),
        )
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True)
    sampler = DistributedSampler(train, seed=SEED)
    loader = DataLoader(train, BATCH // dist.get_world_size(), sampler=sampler)
    total = EPOCHS * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 8, 1 - 0.9 * step / total))

    def train_step(batch):
        x, y = batch
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        report_loss(loss)
        return loss

    average = RunningAverage()

    def show(engine):
        score = accuracy(model.module, test)
        if rank == 0:
            print(f"epoch {engine.epoch}: batch loss {average.value.item():.4f}, accuracy {score:.3f}")

    with watch(model, optimizer):
        Engine(train_step, [average], [show]).run(loader, EPOCHS)


if __name__ == "__main__":
    spawn(main)
