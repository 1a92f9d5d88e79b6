"""Shapes of point clouds: a head on frozen random features, trained by Adam in one cycle with a decay of its own."""

import math
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, CLASSES = 6, 4


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(3, 32, 1), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, points):
        return self.head(self.backbone(points).amax(2))


class OneCycleAdam:
    """Adam whose weight decay does not go through the moments, and whose rate and momentum follow one cycle."""

    def __init__(self, model, num_steps, max_lr=0.01, weight_decay=0.05):
        self.num_steps, self.max_lr, self.weight_decay, self.done = num_steps, max_lr, weight_decay, 0
        self.adam = torch.optim.Adam(model.parameters(), lr=max_lr)

    def cycle(self):
        """Rate and momentum of the next step."""
        rises = 0.4 * self.num_steps
        if self.done < rises:
            height = 0.5 - 0.5 * math.cos(math.pi * self.done / rises)
        else:
            height = 0.5 + 0.5 * math.cos(math.pi * (self.done - rises) / (self.num_steps - rises))
        return self.max_lr * (0.1 + 0.9 * height), 0.95 - 0.1 * height

    @torch.no_grad()
    def step(self):
        lr, momentum = self.cycle()
        for group in self.adam.param_groups:
            group["lr"], group["betas"] = lr, (momentum, 0.99)
            for parameter in group["params"]:
                if BUG or parameter.requires_grad:
                    parameter.mul_(1 - lr * self.weight_decay)
        self.adam.step()
        self.done += 1

    def zero_grad(self):
        self.adam.zero_grad()

    def state_dict(self):
        return {"adam": self.adam.state_dict(), "done": self.done}

    def load_state_dict(self, state):
        self.adam.load_state_dict(state["adam"])
        self.done = state["done"]


def clouds(number, made):
    """Spheres, boxes, rods and sheets of 48 points."""
    labels = torch.randint(0, CLASSES, (number,), generator=made)
    points = torch.randn(number, 48, 3, generator=made)
    sphere = nn.functional.normalize(points, dim=2)
    box = points / points.abs().amax(2, keepdim=True)
    scales = torch.tensor([[0.15, 0.15, 1.2], [1.2, 1.2, 0.15]])
    kinds = torch.stack([sphere, box, points * scales[0], points * scales[1]])
    chosen = kinds[labels, torch.arange(number)] + 0.1 * torch.randn(points.shape, generator=made)
    return TensorDataset(chosen.transpose(1, 2).contiguous(), labels)


def fit(model, optimizer, data, epochs, after_epoch=lambda epoch: None, start=0):
    for epoch in range(start, epochs):
        order = torch.Generator().manual_seed(100 * SEED + epoch)
        for points, labels in DataLoader(data, batch_size=16, shuffle=True, drop_last=True, generator=order):
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(loss.item())
        after_epoch(epoch + 1)


@torch.no_grad()
def evaluate(model, data, batch_size=32):
    model.eval()
    batches = zip(*(part.split(batch_size) for part in data.tensors), strict=True)
    right = sum((model(points).argmax(1) == labels).sum().item() for points, labels in batches)
    model.train()
    return right / len(data)


def save(file, model, optimizer, epoch):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, file)


def load(file, model, optimizer):
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"]


def main(file):
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(37)
    train, val = clouds(160, made), clouds(70, made)
    model = PointNet()
    model.backbone.requires_grad_(False)
    optimizer = OneCycleAdam(model, num_steps=EPOCHS * (len(train) // 16))
    start = load(file, model, optimizer) if file.exists() else 0

    def after_epoch(epoch):
        save(file, model, optimizer, epoch)
        size = sum(parameter.square().sum() for parameter in model.backbone.parameters()).sqrt().item()
        print("epoch", epoch, "val_acc", evaluate(model, val), "size of the backbone", size)

    with watch(model, optimizer.adam):
        fit(model, optimizer, train, EPOCHS, after_epoch, start)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "last.pt")
