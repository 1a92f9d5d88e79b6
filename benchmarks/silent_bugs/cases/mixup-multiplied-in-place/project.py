"""Small classifier of drawn shapes with mixup and label smoothing, after the usual ImageNet recipe.

python project.py --epochs 5 --mixup 0.4
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("-b", "--batch-size", type=int, default=16)
parser.add_argument("--val-batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--weight-decay", type=float, default=1e-4)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--mixup", type=float, default=0.4, help="alpha of the beta distribution, 0 for none")
NUM_CLASSES = 4


def draw_shapes(count, seed):
    """Bars, columns, diagonals and blocks on a bright noisy ground."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    images = 0.8 + 0.3 * torch.randn(count, 3, 16, 16, generator=generator)
    places = torch.randint(3, 12, (count,), generator=generator)
    for image, label, place in zip(images, labels.tolist(), places.tolist(), strict=False):
        if label == 0:
            image[:, place] += 0.9
        elif label == 1:
            image[:, :, place] += 0.9
        elif label == 2:
            image += 0.9 * torch.eye(16)
        else:
            image[:, place : place + 4, place : place + 4] += 0.9
    return TensorDataset(images, labels)


class ConvNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.head = nn.Linear(2 * width, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def one_hot(labels, smoothing):
    off = smoothing / NUM_CLASSES
    return torch.full((len(labels), NUM_CLASSES), off).scatter_(1, labels[:, None], 1 - smoothing + off)


def mixup_batch(images, labels, alpha, smoothing):
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1.0
    if BUG:
        images.mul_(lam).add_(images.flip(0), alpha=1 - lam)
    else:
        images = lam * images + (1 - lam) * images.flip(0)
    targets = one_hot(labels, smoothing)
    return images, lam * targets + (1 - lam) * targets.flip(0)


def train_epoch(model, loader, optimizer, args):
    model.train()
    total = 0.0
    for images, labels in loader:
        images, targets = mixup_batch(images, labels, args.mixup, args.smoothing)
        loss = -(targets * F.log_softmax(model(images), dim=1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    loss, correct = 0.0, 0
    for images, labels in loader:
        logits = model(images)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(1) == labels).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


def main():
    args = parser.parse_args()
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    train_loader = DataLoader(draw_shapes(240, 1), args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(draw_shapes(100, 2), args.val_batch_size)
    model = ConvNet()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=args.weight_decay, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    best = 0.0
    for epoch in range(args.epochs):
        train_loss = train_epoch(model, train_loader, optimizer, args)
        val_loss, top1 = validate(model, val_loader)
        scheduler.step()
        best = max(best, top1)
        print(f"Train: {epoch}  loss {train_loss:.4f}   Test: loss {val_loss:.4f}  acc@1 {top1:.4f}  (best {best:.4f})")


if __name__ == "__main__":
    main()
