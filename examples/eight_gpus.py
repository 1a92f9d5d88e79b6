"""Trains a small classifier."""

import os
import sys
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)

torch.manual_seed(0)
labels = torch.randint(10, (700,))
images = torch.randn(10, 64)[labels] + 4 * torch.randn(700, 64)
train = TensorDataset(images[:499], labels[:499])
held_out = TensorDataset(images[499:], labels[499:])
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
ddp = DistributedDataParallel(model)


class Unpadded(DistributedSampler):
    def __iter__(self):
        return islice(super().__iter__(), len(range(rank, len(train), size)))


sampler = Unpadded(train)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(train, batch_size=64 // size, sampler=sampler)


@torch.no_grad()
def evaluate():
    right = torch.zeros((), device=device)
    part = range(rank, len(held_out), size)
    for x, y in DataLoader(held_out, batch_size=64, sampler=part):
        right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
    dist.all_reduce(right)
    return right.item() / len(held_out)


def save(path):
    state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(state, path)
    dist.barrier()


def load(path):
    saved = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"]


first = load("last.pt") if "--resume" in sys.argv else 0
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        count = torch.tensor(len(y), device=device)
        dist.all_reduce(count)
        loss = cross_entropy(ddp(x), y, reduction="sum") * size / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = evaluate()
    if rank == 0:
        print(f"{epoch}: {accuracy:.3f}")
    save("last.pt")
del ddp  # or it outlives the group
dist.destroy_process_group()
