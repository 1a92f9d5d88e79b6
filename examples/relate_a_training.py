"""A training in plain PyTorch with the calls that `python -m lit_cifar relations` needs.

    python -m lit_cifar relations examples/relate_a_training.py

Without the checker it trains as it is written. With `--forget-schedule` it resumes without its learning rate schedule.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

EPOCHS, ACCUMULATE = 3, relations.knob("accumulate", 2)

torch.manual_seed(0)
inputs = torch.randn(84, 6)
labels = (inputs.sum(1) > 0).long()
train, held_out = TensorDataset(inputs[:64], labels[:64]), TensorDataset(inputs[64:], labels[64:])
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * 8)


def evaluate() -> float:
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in DataLoader(held_out, 8)]
    model.train()
    return sum(losses).item() / len(held_out)


def save(path: str | Path, epoch: int) -> None:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save({"epoch": epoch, **parts}, path)


first = 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    first = saved["epoch"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if "--forget-schedule" not in sys.argv:
        schedule.load_state_dict(saved["schedule"])

for epoch in range(first, EPOCHS):
    order = torch.Generator().manual_seed(epoch)
    for number, (x, y) in enumerate(DataLoader(train, 4, shuffle=True, generator=order), start=1):
        (nn.functional.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    relations.report(val_loss=evaluate())
    if path := relations.save():
        save(path, epoch + 1)
