"""A causal convolution on noisy sums, with gradients of four microbatches in each step; one process."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader

from lit_cifar import relations

STEPS, SIZE, LENGTH = 24, 8, 32
MICROBATCHES, MAX_NORM = relations.knob("accumulate", 4), relations.knob("max_norm", 1.0)


class CausalNet(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.first = nn.Conv1d(1, channels, kernel_size=5)
        self.second = nn.Conv1d(channels, channels, kernel_size=5, dilation=4)
        self.out = nn.Conv1d(channels, 1, kernel_size=1)

    def forward(self, series):
        hidden = torch.relu(self.first(nn.functional.pad(series, (4, 0))))
        hidden = torch.relu(self.second(nn.functional.pad(hidden, (16, 0))))
        return self.out(hidden)


def batches():
    made = torch.Generator().manual_seed(SEED + 5)
    for _ in range(STEPS):
        series = torch.randn(4 * SIZE, 1, LENGTH, generator=made)
        targets = nn.functional.avg_pool1d(nn.functional.pad(series, (7, 0)), 8, stride=1) * 8
        yield from zip(series.split(SIZE), targets.split(SIZE), strict=True)


def train():
    torch.manual_seed(SEED)
    model = CausalNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.03), momentum=0.9)
    with watch(model, optimizer):
        parts = iter(DataLoader([*batches()], batch_size=None))
        for window in zip(*[parts] * MICROBATCHES, strict=False):
            total = 0.0
            for part, wanted in window:
                loss = nn.functional.mse_loss(model(part), wanted) / MICROBATCHES
                loss.backward()
                total += loss.item()
                if BUG:
                    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            if not BUG:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            report_loss(total)
    print("weights", sum(parameter.abs().sum().item() for parameter in model.parameters()))


if __name__ == "__main__":
    train()
