"""A detector of one box on small images, interrupted after six of eight epochs and resumed."""

import math

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

EPOCHS = 8


def decay(epoch):
    return 0.9 * (1 + math.cos(epoch * math.pi / EPOCHS)) / 2 + 0.1


def make_model():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.SiLU(), nn.Conv2d(8, 16, 3), nn.SiLU(), nn.Flatten(), nn.Linear(16 * 16, 4)
    )
    return model, torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.05), momentum=0.937, nesterov=True)


def boxes(count=192):
    made = torch.Generator().manual_seed(12)
    corner = torch.randint(0, 8, (count, 2), generator=made)
    size = torch.randint(3, 7, (count, 2), generator=made)
    images = 0.2 * torch.randn(count, 1, 14, 14, generator=made)
    for image, (x, y), (w, h) in zip(images, corner.tolist(), size.tolist(), strict=True):
        image[0, y : y + h, x : x + w] += 1
    return TensorDataset(images, torch.cat([corner, corner + size], dim=1) / 14)


def epochs(model, optimizer, scheduler, first, last):
    for epoch in range(first, last):
        order = torch.Generator().manual_seed(100 * SEED + epoch)
        for images, targets in DataLoader(boxes(), batch_size=16, shuffle=True, generator=order):
            optimizer.zero_grad()
            loss = nn.functional.l1_loss(model(images), targets)
            loss.backward()
            optimizer.step()
            report_loss(loss.item())
        scheduler.step()


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model, optimizer = make_model()
    saved = {"epoch": 0}
    if path := relations.resume():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    if not path:
        scheduler = LambdaLR(optimizer, decay)
    elif BUG:
        scheduler = LambdaLR(optimizer, decay)
        scheduler.last_epoch = saved["epoch"]
    else:
        scheduler = LambdaLR(optimizer, decay, last_epoch=saved["epoch"] - 1)
    with watch(model, optimizer):
        for epoch in range(saved["epoch"], EPOCHS):
            epochs(model, optimizer, scheduler, epoch, epoch + 1)
            if path := relations.save():
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(states | {"epoch": epoch + 1}, path)
    print("weights", sum(parameter.abs().sum().item() for parameter in model.parameters()))
