"""Lesions in scans that are cut into patches on the fly; the first scans that are read stay in a cache."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lit_cifar import relations

SCANS, HELD_OUT, CACHED, PATCH, EPOCHS = 12, 5, 7, 8, 5


class Patches(IterableDataset):
    """Patches of the scans, in the order that is set for the epoch; those of `num_cached` scans are cut once."""

    def __init__(self, scans, num_cached=0):
        self.scans, self.order = scans, list(range(len(scans)))
        self.cache = [self.cut(index) for index in range(num_cached)]

    def cut(self, index):
        image, mask = self.scans[index]
        image = (image - image.mean()) / image.std()
        both = torch.stack([image, mask]).unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
        return both.reshape(2, -1, PATCH, PATCH).transpose(0, 1)

    def shuffle(self, epoch):
        made = torch.Generator().manual_seed(100 * SEED + epoch)
        self.order = torch.randperm(len(self.scans), generator=made).tolist()

    def __iter__(self):
        slot = None
        for index in self.order:
            if index < len(self.cache):
                slot = index
            elif not BUG:
                slot = None
            for patch in self.cut(index) if slot is None else self.cache[slot]:
                yield patch[:1], patch[1:]


class Net(nn.Module):
    """Fine features, coarse features, and both together."""

    def __init__(self, width=8):
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.InstanceNorm2d(width, affine=True), nn.PReLU())
        self.coarse = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.PReLU(), nn.Upsample(scale_factor=2))
        self.last = nn.Conv2d(3 * width, 1, 3, padding=1)

    def forward(self, patches):
        fine = self.fine(patches)
        return self.last(torch.cat([fine, self.coarse(fine)], 1))


def scan(made):
    grid = torch.stack(torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij"))
    mask = torch.zeros(32, 32)
    for centre in 4 + 24 * torch.rand(4, 2, 1, 1, generator=made):
        mask[(grid - centre).norm(dim=0) < 2 + 3 * torch.rand((), generator=made)] = 1
    texture = nn.functional.avg_pool2d(torch.randn(1, 1, 32, 32, generator=made), 3, 1, 1)[0, 0]
    return 3 * torch.rand((), generator=made) + mask + 1.5 * texture, mask


def dice_and_entropy(logits, masks):
    found = logits.sigmoid()
    dice = (2 * (found * masks).sum() + 1) / (found.sum() + masks.sum() + 1)
    return nn.functional.binary_cross_entropy_with_logits(logits, masks) + 1 - dice


@torch.no_grad()
def evaluate(model, data, batch_size=24):
    """Dice coefficient over all pixels of all scans."""
    model.eval()
    common, sizes = 0.0, 0.0
    for patches, masks in DataLoader(data, batch_size=batch_size):
        found = (model(patches) > 0).float()
        common += 2 * (found * masks).sum().item()
        sizes += (found.sum() + masks.sum()).item()
    model.train()
    return common / sizes


def save(file, model, optimizer, schedule, epoch):
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, file)


def load(file, model, optimizer, schedule):
    saved = torch.load(file, weights_only=True)
    for name, part in {"model": model, "optimizer": optimizer, "schedule": schedule}.items():
        part.load_state_dict(saved[name])
    return saved["epoch"]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(19)
    train = Patches([scan(made) for _ in range(SCANS)], num_cached=CACHED)
    val = Patches([scan(made) for _ in range(HELD_OUT)])
    model = Net()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=relations.knob("lr", 5e-3), weight_decay=relations.knob("weight_decay", 0.01)
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    with tempfile.TemporaryDirectory() as folder, watch(model, optimizer):
        file = Path(folder) / "last.pt"
        start = load(file, model, optimizer, schedule) if file.exists() else 0
        if path := relations.resume():
            start = load(path, model, optimizer, schedule)
        for epoch in range(start, EPOCHS):
            train.shuffle(epoch)
            for patches, masks in DataLoader(train, batch_size=16):
                loss = dice_and_entropy(model(patches), masks)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            schedule.step()
            save(file, model, optimizer, schedule, epoch + 1)
            if path := relations.save():
                save(path, model, optimizer, schedule, epoch + 1)
            if (epoch + 1) % relations.knob("validate_every", 1) == 0:
                val_dice = evaluate(model, val)
                relations.report(val_dice=val_dice)
                print("epoch", epoch, "val_dice", val_dice)
