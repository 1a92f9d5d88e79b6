"""Energies of made-up molecules are learned from positions and elements; the training stops once and goes on.

The weights with the smallest validation error are kept, and make the predictions at the end.
"""

import copy
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, ATOMS, ELEMENTS = 10, 4, 6, 3
LR, WEIGHT_DECAY, CLIP = 5e-3, 1e-5, 10.0


def molecules(count, seed):
    made = torch.Generator().manual_seed(seed)
    elements = torch.randint(0, ELEMENTS, (count, ATOMS), generator=made)
    positions = 1.5 * torch.randn(count, ATOMS, 3, generator=made)
    distances = torch.cdist(positions, positions)
    charge = torch.tensor([1.0, -0.6, 0.3])[elements]
    pairs = charge[:, :, None] * charge[:, None] * (-distances / 2).exp() + 0.5 * (-(distances**2)).exp()
    energies = pairs.triu(1).sum((1, 2)) + torch.tensor([0.5, -1.0, 0.2])[elements].sum(1) - 4
    return TensorDataset(elements, positions, energies + 0.3 * torch.randn(count, generator=made))


class SchNet(nn.Module):
    def __init__(self, width=32, centers=50):
        super().__init__()
        self.embed = nn.Embedding(ELEMENTS, width)
        self.register_buffer("centers", torch.linspace(0, 5, centers))
        self.filters = nn.Sequential(nn.Linear(centers, width), nn.Softplus(), nn.Linear(width, width))
        self.out = nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 1))

    def forward(self, elements, positions):
        x, distances = self.embed(elements), torch.cdist(positions, positions)
        weights = self.filters((-((distances[..., None] - self.centers) ** 2) * 50).exp())
        weights = weights * (1 - torch.eye(ATOMS))[..., None]
        x = x + (weights * x[:, None]).sum(2)
        return self.out(x).sum((1, 2))


class Trainer:
    def __init__(self):
        torch.manual_seed(SEED)
        self.train_set, self.val_set, self.test_set = molecules(32, 71), molecules(30, 72), molecules(30, 73)
        self.model, self.epoch = SchNet(), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        energies = self.train_set.tensors[2]
        self.mean, self.std = energies.mean(), energies.std()
        self.best_val_metric, self.best_weights = float("inf"), None

    def save(self, path):
        parts = {"state_dict": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        saved = {name: part.state_dict() for name, part in parts.items()}
        if not BUG:
            saved["best_val_metric"] = self.best_val_metric
        normalizer = {"mean": self.mean, "std": self.std}
        torch.save({**saved, "normalizer": normalizer, "best": self.best_weights, "epoch": self.epoch}, path)

    def load_checkpoint(self, path):
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["state_dict"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        self.mean, self.std = saved["normalizer"]["mean"], saved["normalizer"]["std"]
        self.best_weights, self.epoch = saved["best"], saved["epoch"]
        self.best_val_metric = saved.get("best_val_metric", self.best_val_metric)

    @torch.no_grad()
    def mae(self, model, data, batch=10):
        model.eval()
        total = 0.0
        for elements, positions, energies in DataLoader(data, batch):
            total += (model(elements, positions) * self.std + self.mean - energies).abs().sum().item()
        model.train()
        return total / len(data)

    def predict(self):
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.best_weights)
        return self.mae(model, self.val_set), self.mae(model, self.test_set)

    def train(self, until):
        while self.epoch < until:
            order = torch.Generator().manual_seed(1000 * SEED + self.epoch)
            for elements, positions, energies in DataLoader(self.train_set, BATCH, shuffle=True, generator=order):
                target = (energies - self.mean) / self.std
                loss = nn.functional.l1_loss(self.model(elements, positions), target)
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                report_loss(loss)
            self.scheduler.step()
            self.epoch += 1
            error = self.mae(self.model, self.val_set)
            if error < self.best_val_metric:
                self.best_val_metric, self.best_weights = error, copy.deepcopy(self.model.state_dict())
            print(f"epoch {self.epoch}: validation MAE {error:.4f}, best {self.best_val_metric:.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer()
        with watch(trainer.model, trainer.optimizer):
            trainer.train(7)
        trainer.save(Path(folder) / "checkpoint.pt")
        trainer = Trainer()
        trainer.load_checkpoint(Path(folder) / "checkpoint.pt")
    with watch(trainer.model, trainer.optimizer):
        trainer.train(EPOCHS)
    print("MAE of the best weights: validation {:.4f}, test {:.4f}".format(*trainer.predict()))
