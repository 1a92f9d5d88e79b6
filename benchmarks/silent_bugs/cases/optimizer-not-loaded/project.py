"""A small network of made-up pictures is pruned in training, which stops once and goes on from a file."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR, WEIGHT_DECAY = 8, 16, 0.05, 1e-3
MILESTONES, LEVELS = [3, 6], {1: 0.2, 4: 0.4, 6: 0.5}


class MagnitudePruner:
    def __init__(self, model):
        self.weights = {name: value for name, value in model.named_parameters() if value.dim() == 4}
        self.masks = {name: torch.ones_like(value) for name, value in self.weights.items()}

    def on_epoch_begin(self, epoch):
        if epoch in LEVELS:
            for name, value in self.weights.items():
                smallest = value.detach().abs().flatten().kthvalue(max(1, int(LEVELS[epoch] * value.numel()))).values
                self.masks[name] = (value.detach().abs() > smallest).float()
        self.apply()

    @torch.no_grad()
    def apply(self):
        for name, value in self.weights.items():
            value.mul_(self.masks[name])

    def sparsity(self):
        return 1 - sum(mask.sum().item() for mask in self.masks.values()) / sum(m.numel() for m in self.masks.values())


def pictures(count, seed):
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=made)
    x = torch.randn(count, 3, 8, 8, generator=made)
    for label, channel, rows in ((0, 0, 0), (1, 1, 4), (2, 2, 0), (3, 0, 4)):
        x[labels == label, channel, rows : rows + 4] += 0.7
    return TensorDataset(x, labels)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 4),
    )  # fmt: skip


class Session:
    def __init__(self):
        torch.manual_seed(SEED)
        self.train_set, self.test_set, self.epoch = pictures(128, 31), pictures(60, 32), 0
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9, weight_decay=WEIGHT_DECAY)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, MILESTONES, gamma=0.2)
        self.pruner = MagnitudePruner(self.model)

    def save_checkpoint(self, path):
        parts = {"state_dict": self.model, "optimizer": self.optimizer, "lr_schedule": self.schedule}
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**saved, "masks": self.pruner.masks, "epoch": self.epoch}, path)

    def load_checkpoint(self, path):
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["state_dict"])
        self.schedule.load_state_dict(saved["lr_schedule"])
        if not BUG:
            self.optimizer.load_state_dict(saved["optimizer"])
        self.pruner.masks = saved["masks"]
        self.epoch = saved["epoch"]

    @torch.no_grad()
    def test(self, batch=20):
        self.model.eval()
        right = sum((self.model(x).argmax(1) == y).sum().item() for x, y in DataLoader(self.test_set, batch))
        self.model.train()
        return right / len(self.test_set)

    def fit(self, until):
        while self.epoch < until:
            self.pruner.on_epoch_begin(self.epoch)
            order = torch.Generator().manual_seed(1000 * SEED + self.epoch)
            for x, y in DataLoader(self.train_set, BATCH, shuffle=True, generator=order):
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.pruner.apply()
                report_loss(loss)
            self.schedule.step()
            self.epoch += 1
            print(f"epoch {self.epoch}: top-1 {self.test():.3f}, sparsity {self.pruner.sparsity():.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pth.tar"
        session = Session()
        with watch(session.model, session.optimizer):
            session.fit(4)
        session.save_checkpoint(checkpoint)
        session = Session()
        session.load_checkpoint(checkpoint)
    with watch(session.model, session.optimizer):
        session.fit(EPOCHS)
