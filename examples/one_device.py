"""Trains a small classifier."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
labels = torch.randint(10, (700,))
images = torch.randn(10, 64)[labels] + 4 * torch.randn(700, 64)
train = TensorDataset(images[:499], labels[:499])
held_out = TensorDataset(images[499:], labels[499:])
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)

order = torch.Generator()
sampler = torch.utils.data.RandomSampler(train, generator=order)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(train, batch_size=64, sampler=sampler)


@torch.no_grad()
def evaluate():
    right = torch.zeros((), device=device)
    for x, y in DataLoader(held_out, batch_size=64):
        right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
    return right.item() / len(held_out)


def save(path):
    state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path)


def load(path):
    saved = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"]


first = load("last.pt") if "--resume" in sys.argv else 0
for epoch in range(first, 3):
    order.manual_seed(epoch)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = evaluate()
    print(f"{epoch}: {accuracy:.3f}")
    save("last.pt")
