"""A classifier of series on two ranks that read other lengths, with a batch norm that is synchronised by hand.

With the bug the running statistics, and with them the accuracy of the evaluation and the weights, are others.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lit_cifar import relations


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx, gradients):
        return SumOfRanks.forward(ctx, gradients)


class SyncNorm(nn.BatchNorm1d):
    def forward(self, series):
        if not self.training:
            return super().forward(series)
        count = torch.tensor(series.numel() / self.num_features)
        total = count * dist.get_world_size() if BUG else SumOfRanks.apply(count)
        share, own = count / total, series.mean((0, 2))
        mean = SumOfRanks.apply(share * own)
        variance = SumOfRanks.apply(share * (series.var((0, 2), unbiased=False) + (own - mean) ** 2))
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * total / (total - 1), self.momentum)
        normed = (series - mean[:, None]) / (variance[:, None] + self.eps).sqrt()
        return self.weight[:, None] * normed + self.bias[:, None]


def network():
    return nn.Sequential(
        nn.Conv1d(1, 8, 5, padding=2), SyncNorm(8), nn.ReLU(),
        nn.Conv1d(8, 8, 5, padding=2), SyncNorm(8), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def read_batch(made, length):
    labels = torch.randint(0, 3, (12,), generator=made)
    speed = 0.3 * (1 + labels.view(-1, 1, 1)) + 0.05 * torch.randn(12, 1, 1, generator=made)
    level = 2.0 if length < 32 else -0.5  # short recordings come from another device
    return torch.sin(speed * torch.arange(length)) + level + 0.3 * torch.randn(12, 1, length, generator=made), labels


def main(rank):
    torch.manual_seed(SEED)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 5e-3))
    made = torch.Generator().manual_seed(1000 + 10 * SEED + rank)
    batches = [read_batch(made, 20 if rank == 0 else 60) for _ in range(40)]
    with watch(model, optimizer):
        for series, labels in DataLoader(batches, batch_size=None):
            loss = nn.functional.cross_entropy(model(series), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(loss.item())
    norm = model.module[1]
    print(f"rank {rank}: mean {norm.running_mean.sum().item():.4f}, variance {norm.running_var.sum().item():.4f}")


if __name__ == "__main__":
    spawn(main, 2)
