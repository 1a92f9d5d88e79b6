"""Forecasts of made-up electricity loads of seven houses; the best epoch by validation loss is kept and tested."""

import math
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEEN, AHEAD, EPOCHS, BATCH, PATIENCE = 24, 8, 5, 16, 3


class Windows(Dataset):
    def __init__(self, flag):
        made = torch.Generator().manual_seed(61)
        hours = torch.arange(420.0)[:, None]
        phase = torch.rand(7, generator=made) * 2 * math.pi
        daily, weekly = torch.sin(2 * math.pi * hours / 24 + phase), torch.sin(2 * math.pi * hours / 168 - phase)
        loads = daily + 0.5 * weekly + 0.002 * hours + 0.3 * torch.randn(420, 7, generator=made)
        first, last = {"train": (0, 260), "val": (236, 340), "test": (316, 420)}[flag]
        known = loads[:260]
        self.loads = ((loads - known.mean(0)) / known.std(0))[first:last]

    def __len__(self):
        return len(self.loads) - SEEN - AHEAD + 1

    def __getitem__(self, index):
        middle = index + SEEN
        return self.loads[index:middle], self.loads[middle : middle + AHEAD]


def data_provider(flag):
    if flag == "train":
        shuffle, drop_last = True, True
    else:
        shuffle, drop_last = False, BUG
    data = Windows(flag)
    order = torch.Generator().manual_seed(SEED)
    return DataLoader(data, BATCH, shuffle=shuffle, drop_last=drop_last, generator=order)


class Decomposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.trend = nn.AvgPool1d(7, stride=1, padding=3, count_include_pad=False)
        self.slow, self.fast = nn.Linear(SEEN, AHEAD), nn.Sequential(nn.Dropout(0.1), nn.Linear(SEEN, AHEAD))

    def forward(self, loads):
        loads = loads.transpose(1, 2)
        trend = self.trend(loads)
        return (self.slow(trend) + self.fast(loads - trend)).transpose(1, 2)


@torch.no_grad()
def vali(model, loader):
    model.eval()
    total, count = 0.0, 0
    for seen, ahead in loader:
        total += (model(seen) - ahead).square().mean((1, 2)).sum().item()
        count += len(seen)
    model.train()
    return total / count


def adjust_learning_rate(optimizer, epoch, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate * 0.7**epoch


if __name__ == "__main__":
    torch.manual_seed(SEED)
    train_loader, vali_loader, test_loader = (data_provider(flag) for flag in ("train", "val", "test"))
    model = Decomposed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best, waited = math.inf, 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.pth"
        with watch(model, optimizer):
            for epoch in range(EPOCHS):
                adjust_learning_rate(optimizer, epoch, 0.01)
                for seen, ahead in train_loader:
                    loss = nn.functional.mse_loss(model(seen), ahead)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    report_loss(loss.item())
                score = vali(model, vali_loader)
                print(f"epoch {epoch}: vali {score:.4f}, test {vali(model, test_loader):.4f}")
                waited = 0 if score < best else waited + 1
                if score < best:
                    best = score
                    torch.save(model.state_dict(), file)
                if waited == PATIENCE:
                    break
        model.load_state_dict(torch.load(file, weights_only=True))
        print(f"kept: vali {best:.4f}, test {vali(model, test_loader):.4f}")
