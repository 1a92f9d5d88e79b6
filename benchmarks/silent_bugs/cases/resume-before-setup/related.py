"""Where is the square in the picture: a detector on a grid, evaluated with an average of its weights, and resumed."""

import copy
import math
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

EPOCHS = 6


class Detector(nn.Module):
    """Objectness and the offset of the centre, for each of 4 x 4 cells."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2, 1),
            nn.BatchNorm2d(12),
            nn.SiLU(),
            nn.Conv2d(12, 24, 3, 2, 1),
            nn.BatchNorm2d(24),
            nn.SiLU(),
        )
        self.head = nn.Conv2d(24, 3, 1)

    def forward(self, images):
        return self.head(self.backbone(images)).flatten(2)


def detection_loss(outputs, centres):
    cells = (centres // 4).long()
    cells = 4 * cells[:, 0] + cells[:, 1]
    offsets = outputs[torch.arange(len(cells)), 1:, cells].sigmoid()
    return nn.functional.cross_entropy(outputs[:, 0], cells) + nn.functional.l1_loss(offsets, centres % 4 / 4)


class Average:
    def __init__(self, model):
        self.module = copy.deepcopy(model).eval()
        self.updates = 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = 0.97 * (1 - math.exp(-self.updates / 8))
        for mine, new in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if mine.is_floating_point():
                mine.lerp_(new, 1 - decay)
            else:
                mine.copy_(new)


class Trainer:
    def __init__(self, train, val):
        self.train_set, self.val_set = train, val
        self.model = Detector()
        self.optimizer, self.average, self.epoch = None, None, 0

    def setup(self):
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=relations.knob("weight_decay", 5e-4)
        )
        self.average = Average(self.model)

    def save(self, file):
        average = {"model": self.average.module.state_dict(), "updates": self.average.updates}
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "average": average}
        torch.save(state | {"epoch": self.epoch}, file)

    def resume(self, file):
        saved = torch.load(file, weights_only=True)
        self.model.load_state_dict(saved["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
        if self.average is not None:
            self.average.module.load_state_dict(saved["average"]["model"])
            self.average.updates = saved["average"]["updates"]
        self.epoch = saved["epoch"]

    def train(self, until):
        while self.epoch < until:
            for group in self.optimizer.param_groups:
                group["lr"] = relations.knob("lr", 0.05) * (1 + math.cos(math.pi * self.epoch / EPOCHS)) / 2
            order = torch.Generator().manual_seed(100 * SEED + self.epoch)
            for images, centres in DataLoader(self.train_set, batch_size=16, shuffle=True, generator=order):
                loss = detection_loss(self.model(images), centres)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.average.update(self.model)
                report_loss(loss.item())
            self.epoch += 1
            if path := relations.save():
                self.save(path)
            if self.epoch % relations.knob("validate_every", 1) == 0:
                val_loss = self.evaluate()
                relations.report(val_loss=val_loss, average=self.average.module)
                print("epoch", self.epoch, "val_loss", val_loss)

    @torch.no_grad()
    def evaluate(self, batch_size=20):
        batches = zip(*(part.split(batch_size) for part in self.val_set.tensors), strict=True)
        losses = [detection_loss(self.average.module(images), centres) * len(images) for images, centres in batches]
        return sum(losses).item() / len(self.val_set)


def pictures(number, made):
    images = 0.5 * torch.randn(number, 3, 16, 16, generator=made)
    corners = torch.randint(0, 13, (number, 2), generator=made)
    for image, (row, column) in zip(images, corners.tolist(), strict=True):
        image[:, row : row + 4, column : column + 4] += 1.2
    return TensorDataset(images, corners + 1.5)


def start(file):
    made = torch.Generator().manual_seed(17)
    trainer = Trainer(pictures(152, made), pictures(50, made))
    if not BUG:
        trainer.setup()
    if file.exists():
        trainer.resume(file)
    elif path := relations.resume():
        trainer.resume(path)
    if BUG:
        trainer.setup()
    return trainer


if __name__ == "__main__":
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "last.pt"
        trainer = start(file)
        trainer.train(EPOCHS // 2)
        trainer.save(file)
        trainer = start(file)
        with watch(trainer.model, trainer.optimizer):
            trainer.train(EPOCHS)
