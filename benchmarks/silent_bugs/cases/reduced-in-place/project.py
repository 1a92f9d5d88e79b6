"""Which of three kinds a time series is of; two processes, with a metric that shows the progress of a validation."""

import functools

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, LR, SHOW_EVERY = 6, 12, 0.02, 2


def reduced_over_ranks(*names):
    """For `compute`: it sees the sums over all ranks of these attributes."""

    def wrap(compute):
        @functools.wraps(compute)
        def wrapper(metric):
            own = {name: getattr(metric, name) for name in names}
            for name in names:
                total = own[name].clone()
                dist.all_reduce(total)
                setattr(metric, name, total)
            result = compute(metric)
            if not BUG:
                for name in names:
                    setattr(metric, name, own[name])
            return result

        return wrapper

    return wrap


class Accuracy:
    def __init__(self):
        self.correct, self.examples = torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)

    def update(self, outputs, labels):
        self.correct = self.correct + (outputs.argmax(1) == labels).sum()
        self.examples = self.examples + len(labels)

    @reduced_over_ranks("correct", "examples")
    def compute(self):
        return self.correct.item() / self.examples.item()


def series(count, seed):
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=made)
    times = torch.linspace(0, 6.28, 24) + 6.28 * torch.rand(count, 1, generator=made)
    waves = torch.stack([times.sin(), times.sin().sign() * 0.7, (2 * times).sin()])
    return TensorDataset(waves[labels, torch.arange(count)] + 0.7 * torch.randn(count, 24, generator=made), labels)


def validate(model, loader, show):
    model.eval()
    accuracy = Accuracy()
    with torch.no_grad():
        for number, (values, labels) in enumerate(loader, start=1):
            accuracy.update(model(values), labels)
            if number % SHOW_EVERY == 0:
                so_far = accuracy.compute()
                if show:
                    print(f"  {number}/{len(loader)} accuracy {so_far:.3f}")
    model.train()
    return accuracy.compute()


def main(rank):
    torch.manual_seed(SEED)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    train, held_out = series(144, 1), series(72, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=SEED)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler)
    own_share = range(rank, len(held_out), dist.get_world_size())
    val_loader = DataLoader(torch.utils.data.Subset(held_out, own_share), batch_size=8)
    best = 0.0
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for values, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(values), labels)
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            result = validate(model, val_loader, rank == 0)
            best = max(best, result)
            if rank == 0:
                print(f"epoch {epoch}: accuracy {result:.4f}")
    if rank == 0:
        print("best", best, "weights", sum(weight.abs().sum().item() for weight in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
