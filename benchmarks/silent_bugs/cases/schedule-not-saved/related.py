"""Next-frame prediction with fully_shard and a linear warm-up and decay, resumed after half of the steps."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from lit_cifar import relations

STEPS, WARMUP = 40, 8


def warmup_decay(step):
    return (step + 1) / (WARMUP + 1) if step < WARMUP else (STEPS - step) / (STEPS - WARMUP)


class Frames(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Linear(25, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)
        )
        self.last = nn.Linear(width, 25)

    def forward(self, frames):
        hidden = self.first(frames)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return frames + self.last(hidden)


def start():
    model = Frames()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 0.02))
    return model, optimizer, LambdaLR(optimizer, warmup_decay)


def train(model, optimizer, scheduler, made, steps):
    for _ in range(steps):
        frames = relations.share(torch.randn(32, 5, 5, generator=made))
        moved = frames.roll(1, dims=2)
        loss = nn.functional.mse_loss(model(frames.flatten(1)), moved.flatten(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        report_loss(loss.item())


def main(rank):
    torch.manual_seed(SEED)
    made, first = torch.Generator().manual_seed(5 * SEED), 0
    model, optimizer, scheduler = start()
    if path := relations.resume():
        first, position, *checkpoint = torch.load(f"{path}.{rank}", weights_only=False)
        made.set_state(position)
        model.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(checkpoint[1])
        if BUG:
            scheduler = LambdaLR(optimizer, warmup_decay)
        else:
            scheduler.load_state_dict(checkpoint[2])
    with watch(model, optimizer):
        for step in range(first, STEPS):
            train(model, optimizer, scheduler, made, 1)
            if path := relations.save():
                checkpoint = [part.state_dict() for part in (model, optimizer, scheduler)]
                torch.save([step + 1, made.get_state(), *checkpoint], f"{path}.{rank}")
    weights = model.last.weight.full_tensor()
    if rank == 0:
        print("last layer", weights.abs().sum().item(), "lr", scheduler.get_last_lr())


if __name__ == "__main__":
    spawn(main, 2)
