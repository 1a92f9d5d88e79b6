"""Cells in small volumes, segmented by a U-Net of 3-D convolutions with BatchNorm; the best weights are kept."""

import copy
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations


def block(inputs, outputs):
    return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), nn.BatchNorm3d(outputs), nn.ReLU())


class UNet3d(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.down, self.bottom, self.up = block(1, width), block(width, 2 * width), block(3 * width, width)
        self.last = nn.Conv3d(width, 1, 1)

    def forward(self, volumes):
        fine = self.down(volumes)
        coarse = self.bottom(nn.functional.max_pool3d(fine, 2))
        return self.last(self.up(torch.cat([fine, nn.functional.interpolate(coarse, scale_factor=2)], 1)))


class Trainer:
    def __init__(self, folder, train, val):
        self.folder, self.train, self.val = folder, train, val
        self.model = UNet3d()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=relations.knob("lr", 5e-3))
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.epoch, self.best, self.best_weights = 0, float("inf"), None

    def fit(self, epochs):
        while self.epoch < epochs:
            order = torch.Generator().manual_seed(1000 * SEED + self.epoch)
            for volumes, masks in DataLoader(self.train, batch_size=6, shuffle=True, generator=order):
                loss = nn.functional.binary_cross_entropy_with_logits(self.model(volumes), masks)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                report_loss(loss.item())
            self.schedule.step()
            self.epoch += 1
            if self.epoch % relations.knob("validate_every", 1):
                continue
            val_loss, val_dice = self.validate()
            relations.report(val_loss=val_loss, val_dice=val_dice)
            print("epoch", self.epoch, "val_loss", val_loss, "val_dice", val_dice)
            if val_loss < self.best:
                self.best, self.best_weights = val_loss, copy.deepcopy(self.model.state_dict())
                relations.report(score=val_loss)
            self.save(self.folder / "last.pt")
            if path := relations.save():
                self.save(path)

    @torch.no_grad()
    def validate(self, batch_size=4):
        if not BUG:
            self.model.eval()
        total, common, sizes = 0.0, 0.0, 0.0
        for volumes, masks in zip(*(part.split(batch_size) for part in self.val.tensors), strict=True):
            logits = self.model(volumes)
            total += nn.functional.binary_cross_entropy_with_logits(logits, masks).item() * len(volumes)
            found = (logits > 0).float()
            common += 2 * (found * masks).sum().item()
            sizes += (found.sum() + masks.sum()).item()
        self.model.train()
        return total / len(self.val), common / sizes

    def save(self, file):
        parts = {part: getattr(self, part).state_dict() for part in ("model", "optimizer", "schedule")}
        best = {"best": self.best, "best_weights": self.best_weights}
        torch.save(parts | best | {"epoch": self.epoch}, file)

    def load(self, file):
        saved = torch.load(file, weights_only=True)
        for part in ("model", "optimizer", "schedule"):
            getattr(self, part).load_state_dict(saved[part])
        self.epoch, self.best, self.best_weights = (saved[name] for name in ("epoch", "best", "best_weights"))


def volumes(number, made):
    masks = (nn.functional.avg_pool3d(torch.randn(number, 1, 8, 8, 8, generator=made), 3, 1, 1) > 0.15).float()
    brightness = 1 + torch.rand(number, 1, 1, 1, 1, generator=made)
    return TensorDataset(brightness * (masks + 0.4 * torch.randn(masks.shape, generator=made)), masks)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(31)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder), volumes(45, made), volumes(14, made))
        if path := relations.resume():
            trainer.load(path)
        with watch(trainer.model, trainer.optimizer):
            trainer.fit(6)
        trainer.model.load_state_dict(trainer.best_weights)
        relations.report(rescored=trainer.validate()[0])
        print("val_loss of the best", trainer.best, trainer.validate()[0])
