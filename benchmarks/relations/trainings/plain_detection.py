"""Boxes in pictures of unlike sizes: a batch is a tuple of lists, as torchvision's references collate it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from lit_cifar import relations

WORLD_SIZE, ACCUMULATE = int(os.environ.get("WORLD_SIZE", "1")), relations.knob("accumulate", 2)


class Scenes(Dataset):
    """A bright rectangle in noise, in pictures of 12 to 20 pixels a side."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        made = torch.Generator().manual_seed(self.first + index)
        height, width = torch.randint(12, 21, (2,), generator=made).tolist()
        left, top = (int(torch.randint(0, size // 2, (1,), generator=made)) for size in (width, height))
        box = torch.tensor([left, top, left + width // 3, top + height // 3])
        image = 0.1 * torch.randn(1, height, width, generator=made)
        image[:, box[1] : box[3], box[0] : box[2]] += 1
        return image, {"boxes": box[None].float() / 20, "image_id": torch.tensor(index)}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())
        self.backbone, self.head = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten()), nn.Linear(128, 4)

    def forward(self, images, targets):
        found = self.head(torch.cat([self.backbone(image[None]) for image in images]))
        wanted = torch.cat([target["boxes"] for target in targets])
        return nn.functional.smooth_l1_loss(found, wanted, reduction="none").mean(1)


def collate(samples):
    return tuple(zip(*samples, strict=True))


if WORLD_SIZE > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
train, held_out = Scenes(0, 64), Scenes(1000, 22)
model = Detector()
wrapped = DistributedDataParallel(model) if WORLD_SIZE > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 3e-3))
first = 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"]
for epoch in range(first, 3):
    order = torch.Generator().manual_seed(epoch)
    sampler = DistributedSampler(train) if WORLD_SIZE > 1 else RandomSampler(train, generator=order)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)
    for number, (images, targets) in enumerate(DataLoader(train, 4, sampler=sampler, collate_fn=collate), start=1):
        targets = [dict(target.items()) for target in targets]
        (wrapped(list(images), targets).mean() / ACCUMULATE).backward()
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [model(images, targets) for images, targets in DataLoader(held_out, 4, collate_fn=collate)]
    model.train()
    relations.report(val_loss=torch.cat(losses).mean().item())
    if path := relations.save():
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, path)
