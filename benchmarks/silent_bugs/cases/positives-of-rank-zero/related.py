"""SimCLR on small pictures in two processes; each compares its views with those of both."""

import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations

EPOCHS = 6


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, images):
        return self.projector(self.backbone(images))


class Gather(torch.autograd.Function):
    """Rows of all ranks, in their order; the gradients come back to the rank that the rows came from."""

    @staticmethod
    def forward(ctx, rows):
        gathered = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def simclr_loss(embedded, indexes, temperature=0.3):
    embedded = nn.functional.normalize(embedded, dim=1)
    similarity = torch.exp(embedded @ Gather.apply(embedded).T / relations.knob("temperature", temperature))
    positive = indexes[:, None] == Gather.apply(indexes)[None]
    negative = ~positive
    own = 0 if BUG else dist.get_rank() * len(embedded)
    positive[:, own:].fill_diagonal_(False)
    close, far = (similarity * positive).sum(1), (similarity * negative).sum(1)
    return -torch.log(close / (close + far)).mean()


def augment(images, made):
    """One view: moved, brighter or darker, with noise."""
    moves = torch.randint(-1, 2, (len(images), 2), generator=made).tolist()
    moved = torch.stack([image.roll(move, (1, 2)) for image, move in zip(images, moves, strict=True)])
    brightness = 0.7 + 0.6 * torch.rand(len(images), 1, 1, 1, generator=made)
    return brightness * moved + 0.3 * torch.randn(images.shape, generator=made)


def train_epoch(model, optimizer, loader, epoch, rank):
    loader.sampler.set_epoch(epoch)
    made = torch.Generator().manual_seed(10000 * SEED + 100 * epoch + rank)
    for images, _, indexes in loader:
        views = torch.cat([augment(images, made), augment(images, made)])
        loss = simclr_loss(model(views), indexes.repeat(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report_loss(loss.item())


@torch.no_grad()
def evaluate(encoder, train, val):
    """Accuracy of the nearest mean of a class in the features of the backbone."""
    encoder.eval()
    features = encoder.backbone(train[:][0])
    means = torch.stack([features[train[:][1] == label].mean(0) for label in range(6)])
    found = torch.cdist(encoder.backbone(val[:][0]), means).argmin(1)
    encoder.train()
    return (found == val[:][1]).float().mean().item()


def pictures(number, made):
    labels = torch.arange(number) % 6
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(2))[labels]
    return TensorDataset(images + 0.8 * torch.randn(number, 1, 8, 8, generator=made), labels, torch.arange(number))


def save(file, model, optimizer, epoch):
    if dist.get_rank() == 0:
        state = {"encoder": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, file)
    dist.barrier()


def load(file, model, optimizer):
    saved = torch.load(file, weights_only=True)
    model.module.load_state_dict(saved["encoder"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"]


def main(folder, rank):
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(8)
    train, val = pictures(192, made), pictures(90, made)
    model = DistributedDataParallel(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 3e-3), weight_decay=0.01)
    sampler = DistributedSampler(train, seed=SEED, drop_last=True)
    loader = DataLoader(train, batch_size=24 // dist.get_world_size(), sampler=sampler, drop_last=True)
    file = folder / "last.pt"
    start = load(file, model, optimizer) if file.exists() else 0
    if path := relations.resume():
        start = load(path, model, optimizer)
    with watch(model, optimizer):
        for epoch in range(start, EPOCHS):
            train_epoch(model, optimizer, loader, epoch, rank)
            save(file, model, optimizer, epoch + 1)
            if path := relations.save():
                save(path, model, optimizer, epoch + 1)
            if rank == 0 and (epoch + 1) % relations.knob("validate_every", 1) == 0:
                accuracy = evaluate(model.module, train, val)
                relations.report(val_accuracy=accuracy)
                print("epoch", epoch, "accuracy", accuracy)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(partial(main, Path(folder)), 2)
