"""Images read from a folder, with random crops; BatchNorm, warm-up and cosine; a script with required arguments."""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lit_cifar import relations


class Folder(Dataset):
    def __init__(self, folder: Path, crop: bool) -> None:
        self.files, self.crop = sorted(folder.glob("*.npy")), crop

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int):
        image = torch.from_numpy(np.load(self.files[index])).float()
        if self.crop:
            padded = nn.functional.pad(image, (1, 1, 1, 1))
            top, left = torch.randint(0, 3, (2,)).tolist()
            image = padded[:, top : top + 8, left : left + 8]
        return image, int(self.files[index].stem.split("_")[1])


def make(folder: Path, count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(count):
        label = number % 3
        np.save(folder / f"{number:03d}_{label}.npy", (draw.normal(size=(2, 8, 8)) + label).astype("float32"))


parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--epochs", type=int, required=True)
options = parser.parse_args()
torch.manual_seed(0)
if not options.data.exists():
    make(options.data / "train", 70, 0)
    make(options.data / "val", 25, 1)
train = DataLoader(Folder(options.data / "train", crop=True), batch_size=16, shuffle=True)
held_out = DataLoader(Folder(options.data / "val", crop=False), batch_size=10)
model = nn.Sequential(
    *(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=relations.knob("weight_decay", 1e-3))
steps = options.epochs * len(train)
schedule = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - 5),
    ],
    milestones=[5],
)
first = 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    for name, part in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
        part.load_state_dict(saved[name])
    torch.set_rng_state(saved["random"])
    first = saved["epoch"]
for epoch in range(first, options.epochs):
    model.train()
    for images, labels in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in held_out)
    relations.report(val_acc=right / len(held_out.dataset))
    if path := relations.save():
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(parts | {"random": torch.get_rng_state(), "epoch": epoch + 1}, path)
