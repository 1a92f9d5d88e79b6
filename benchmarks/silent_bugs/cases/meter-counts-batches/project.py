"""Textures in four classes: train, validate after each epoch, keep the best weights."""

import argparse
import copy
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR, DECAY = 6, 16, 0.01, 1e-3


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


class Metrics:
    """Loss and top-1 accuracy of one pass over a dataset."""

    def __init__(self):
        self.meters = {"loss": AverageMeter(), "top1": AverageMeter()}

    def calc(self, loss, logits, labels):
        top1 = (logits.argmax(1) == labels).float().mean()
        n = 1 if BUG else len(labels)
        self.meters["loss"].update(loss.item(), n)
        self.meters["top1"].update(top1.item(), n)

    def result(self):
        return {name: meter.avg for name, meter in self.meters.items()}


def textures(count, seed):
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=made)
    grid = torch.arange(10.0)
    angles = labels.float() * 0.785 + 0.25 * torch.randn(count, generator=made)
    waves = angles.cos()[:, None, None] * grid[:, None] + angles.sin()[:, None, None] * grid
    phase = 6.28 * torch.rand(count, 1, 1, generator=made)
    images = (waves + phase).sin() + 0.8 * torch.randn(count, 10, 10, generator=made)
    return TensorDataset(images[:, None], labels)


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4),
    )  # fmt: skip


@torch.no_grad()
def validate(model, loader):
    model.eval()
    metrics = Metrics()
    for images, labels in loader:
        logits = model(images)
        metrics.calc(nn.functional.cross_entropy(logits, labels), logits, labels)
    model.train()
    return metrics.result()


def save(path, epoch, best, best_weights, **parts):
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"epoch": epoch, "best": best, "best_weights": best_weights, **states}, path)


def load(path, **parts):
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["epoch"], saved["best"], saved["best_weights"]


def main(resume, output):
    torch.manual_seed(SEED)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    train, held_out = textures(160, 1), DataLoader(textures(52, 2), batch_size=BATCH)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first, best, best_weights = load(resume, **parts) if resume else (0, -1.0, None)
    with watch(model, optimizer):
        for epoch in range(first, EPOCHS):
            order = torch.Generator().manual_seed(1000 * SEED + epoch)
            for images, labels in DataLoader(train, batch_size=BATCH, shuffle=True, generator=order):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            scheduler.step()
            result = validate(model, held_out)
            print(f"epoch {epoch}: " + ", ".join(f"{name} {value:.4f}" for name, value in result.items()))
            if result["top1"] > best:
                best, best_weights = result["top1"], copy.deepcopy(model.state_dict())
            if output:
                save(output, epoch + 1, best, best_weights, **parts)
    model.load_state_dict(best_weights)
    print("best", best, "of weights", sum(weight.abs().sum().item() for weight in model.parameters()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--output", type=Path)
    main(**vars(parser.parse_args()))
