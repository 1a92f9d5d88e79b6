"""Loads of made-up machines in the next hours, of which a third stand still; each history is normalized by itself."""

import copy
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, VALID_BATCH, LR, DROPOUT, PAST, FUTURE, TOLERANCE = 8, 16, 10, 5e-3, 0.1, 20, 6, 1e-6


def revin(values, mean, deviation, reverse=False):
    """Into and out of the scale of a history."""
    safe = torch.where(deviation < TOLERANCE, 1.0, deviation)
    if not reverse:
        return (values - mean) / safe
    if BUG:
        return values * deviation + mean
    return values * safe + mean


class Forecaster(nn.Module):
    """From the history and the plan of which hours a machine is to run."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PAST + FUTURE, 48), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(48, FUTURE))

    def forward(self, history, plan):
        mean = history.mean(1, keepdim=True)
        deviation = history.std(1, keepdim=True, unbiased=False)
        normal = revin(history, mean, deviation)
        return revin(self.layers(torch.cat([normal, plan], 1)), mean, deviation, reverse=True)


def machines(count, seed):
    made = torch.Generator().manual_seed(seed)
    hours = torch.arange(PAST + FUTURE) + 24 * torch.rand(count, 1, generator=made)
    size = 0.5 + torch.rand(count, 1, generator=made)
    running = torch.rand(count, 1, generator=made) > 0.33
    plan = (torch.rand(count, FUTURE, generator=made) < 0.6).float()
    load = size * (1 + 0.5 * (hours * 0.8).sin()) + 0.05 * torch.randn(hours.shape, generator=made)
    history = torch.where(running, load[:, :PAST], 0.25)
    future = 0.25 + plan * torch.where(running, load[:, PAST:], 1.0)
    return TensorDataset(history, plan, future)


class Training:
    def __init__(self):
        torch.manual_seed(SEED)
        self.model = Forecaster()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.train, self.valid = machines(128, 1), machines(42, 2)
        self.first, self.best, self.best_model = 0, float("inf"), None

    def save(self, path, epoch):
        states = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        states |= {"best": self.best, "best_model": self.best_model}
        torch.save({"epoch": epoch, "rng": torch.get_rng_state(), **states}, path)

    def load(self, path):
        saved = torch.load(path, weights_only=True)
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(saved[name])
        self.first, self.best, self.best_model = saved["epoch"], saved["best"], saved["best_model"]
        torch.set_rng_state(saved["rng"])

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        error = 0.0
        for history, plan, future in zip(*(part.split(VALID_BATCH) for part in self.valid.tensors), strict=True):
            error += (self.model(history, plan) - future).abs().mean(1).sum().item()
        self.model.train()
        return error / len(self.valid)

    def fit(self, folder):
        with watch(self.model, self.optimizer):
            for epoch in range(self.first, EPOCHS):
                order = torch.Generator().manual_seed(100 * SEED + epoch)
                for history, plan, future in DataLoader(self.train, BATCH, shuffle=True, generator=order):
                    loss = nn.functional.mse_loss(self.model(history, plan), future)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    report_loss(loss.item())
                self.schedule.step()
                error = self.validate()
                print(f"epoch {epoch}: mean absolute error {error:.4f}")
                if error < self.best:
                    self.best, self.best_model = error, copy.deepcopy(self.model.state_dict())
                self.save(folder / "last.pt", epoch + 1)


if __name__ == "__main__":
    training = Training()
    with tempfile.TemporaryDirectory() as folder:
        training.fit(Path(folder))
    training.model.load_state_dict(training.best_model)
    print(f"best {training.best:.4f}, again {training.validate():.4f}")
