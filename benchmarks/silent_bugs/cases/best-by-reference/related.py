"""Imputation of missing readings, stopped early; with the bug the error on the test set is that of the last epoch."""

import copy

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

from lit_cifar import relations


class Imputer(nn.Module):
    def __init__(self, steps=12, features=4, width=96):
        super().__init__()
        size = steps * features
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(2 * size, width), nn.ReLU(), nn.Linear(width, size))
        self.shape = (-1, steps, features)

    def forward(self, series, known):
        return self.layers(torch.cat([series * known, known], dim=1)).view(self.shape)


class Training:
    def __init__(self, model, epochs, patience):
        self.model, self.epochs, self.patience = model, epochs, patience
        self.best_loss, self.best_weights, self.waited = float("inf"), None, 0
        self.optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 0.01))

    def error(self, series, known, wanted):
        missing = 1 - known
        return ((self.model(series, known) - wanted).square() * missing).sum() / missing.sum()

    def fit(self, training, validation):
        for _ in range(self.epochs):
            for part in zip(*(tensor.split(16) for tensor in training), strict=True):
                self.optimizer.zero_grad()
                loss = self.error(*part)
                loss.backward()
                self.optimizer.step()
                report_loss(loss.item())
            with torch.no_grad():
                self.keep_best(self.error(*validation).item())
            if self.waited == self.patience:
                break
        self.model.load_state_dict(self.best_weights)
        with torch.no_grad():
            relations.report(score=self.best_loss, rescored=self.error(*validation).item())

    def keep_best(self, loss):
        self.waited += 1
        if loss < self.best_loss:
            self.best_loss, self.waited = loss, 0
            weights = self.model.state_dict()
            self.best_weights = weights if BUG else copy.deepcopy(weights)


def readings(count, seed):
    made = torch.Generator().manual_seed(seed)
    start = 6.3 * torch.rand(count, 1, 4, generator=made)
    clean = torch.sin(start + 0.6 * torch.arange(12).view(1, 12, 1))
    known = (torch.rand(count, 12, 4, generator=made) > 0.3).float()
    noisy = clean + 0.5 * torch.randn(count, 12, 4, generator=made)
    return noisy, known, noisy


if __name__ == "__main__":
    torch.manual_seed(SEED)
    training = Training(Imputer(), epochs=40, patience=12)
    with watch(training.model, training.optimizer):
        training.fit(readings(48, 1), readings(48, 2))
    with torch.no_grad():
        print("error on the test set", training.error(*readings(200, 3)).item(), "best", training.best_loss)
