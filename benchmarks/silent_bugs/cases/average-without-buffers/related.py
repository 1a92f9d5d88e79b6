"""Prices of flats, evaluated with an exponential average of the weights."""

import copy

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lit_cifar import relations


class Average:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model):
        for average, parameter in zip(self.module.parameters(), model.parameters(), strict=True):
            average.lerp_(parameter, 1 - self.decay)
        if not BUG:
            for average, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
                average.copy_(buffer)


def flats():
    made = torch.Generator().manual_seed(21)
    features = 2 + 1.5 * torch.randn(600, 18, generator=made)
    prices = features @ torch.rand(18, 1, generator=made) + torch.relu(features[:, :1] - 2) * features[:, 1:2]
    return TensorDataset(features, (prices - prices.mean()) / prices.std())


if __name__ == "__main__":
    torch.manual_seed(SEED)
    training, held_out = random_split(flats(), [480, 120], generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(
        nn.BatchNorm1d(18),
        nn.Linear(18, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )
    average = Average(model, relations.knob("decay", 0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 3e-3))
    loader = DataLoader(training, batch_size=32, shuffle=True)
    with watch(model, optimizer):
        for _ in range(4):
            for features, prices in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(features), prices)
                loss.backward()
                optimizer.step()
                average.update(model)
                report_loss(loss.item())
    features, prices = held_out[:]
    with torch.no_grad():
        error = nn.functional.mse_loss(average.module(features), prices).item()
    relations.report(average=average.module, val_error=error)
    print("error of the average", error)
