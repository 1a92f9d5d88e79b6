"""Two views of made-up textures are taught to agree without labels (DINO); two processes, one file on the way.

The teacher's outputs are centered by a running mean over both processes.
"""

import copy
import math
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, BATCH = 5, 8


def textures(count, seed):
    made = torch.Generator().manual_seed(seed)
    waves = torch.randint(1, 5, (count, 2), generator=made) * 2 * math.pi / 12
    row, column = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    return torch.sin(waves[:, 0, None, None] * row + waves[:, 1, None, None] * column)[:, None]


def view(pictures, made):
    shade = 0.7 + 0.6 * torch.rand(len(pictures), 1, 1, 1, generator=made)
    return shade * pictures + 0.3 * torch.randn(pictures.shape, generator=made)


def network():
    body = [nn.Conv2d(1, 12, 3, stride=2), nn.GELU(), nn.Conv2d(12, 16, 3), nn.Flatten(), nn.Linear(144, 32)]
    return nn.Sequential(*body, nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))


class DINOLoss(nn.Module):
    def __init__(self, size=16, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(1, size))

    def forward(self, student, teacher):
        targets = [((out - self.center) / 0.05).softmax(1) for out in teacher]
        logs = [(out / 0.1).log_softmax(1) for out in student]
        loss = -((targets[0] * logs[1]).sum(1) + (targets[1] * logs[0]).sum(1)).mean() / 2
        self.update_center(torch.cat(teacher))
        return loss

    @torch.no_grad()
    def update_center(self, teacher):
        mean = teacher.mean(0, keepdim=True)
        dist.all_reduce(mean)
        self.center = self.center.lerp(mean / dist.get_world_size(), 1 - self.momentum)


@torch.no_grad()
def spread(teacher, pictures):
    outputs = nn.functional.normalize(teacher(pictures), dim=1)
    return outputs.std(0).mean().item()


def fit(rank, path, epochs):
    torch.manual_seed(SEED)
    data, held_out = textures(96, 31), textures(24, 32)
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    net = network()
    teacher, criterion = copy.deepcopy(net).requires_grad_(False), DINOLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.004, weight_decay=0.04)
    parts, first = {"student": net, "teacher": teacher, "optimizer": optimizer}, 0
    if not BUG:
        parts["loss"] = criterion
    if path.exists():
        saved = torch.load(path, weights_only=True)
        first = saved["epoch"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    student = DistributedDataParallel(net)
    with watch(student, optimizer):
        for epoch in range(first, epochs):
            sampler.set_epoch(epoch)
            made = torch.Generator().manual_seed(1000 * SEED + 10 * epoch + rank)
            for number, pictures in enumerate(loader):
                done = (epoch + number / len(loader)) / EPOCHS
                optimizer.param_groups[0]["lr"] = 0.002 * (1 + math.cos(math.pi * done))
                momentum = 1 - 0.02 * (1 + math.cos(math.pi * done))
                views = torch.cat([view(pictures, made), view(pictures, made)])
                loss = criterion(student(views).chunk(2), teacher(views).chunk(2))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                torch._foreach_lerp_(list(teacher.parameters()), [p.detach() for p in net.parameters()], 1 - momentum)
                report_loss(loss.item())
            if rank == 0:
                print(f"epoch {epoch}: spread {spread(teacher, held_out):.4f}")
                torch.save({"epoch": epoch + 1, **{name: part.state_dict() for name, part in parts.items()}}, path)
            dist.barrier()


def main(folder, rank):
    fit(rank, Path(folder) / "checkpoint.pth", 3)
    fit(rank, Path(folder) / "checkpoint.pth", EPOCHS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(partial(main, folder), 2)
