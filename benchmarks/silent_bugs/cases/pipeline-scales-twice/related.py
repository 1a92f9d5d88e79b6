"""A convolutional regressor cut into two stages by hand, four microbatches in each step."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.utils.data import DataLoader

from lit_cifar import relations

MICROBATCHES = relations.knob("accumulate", 4)
SIZE = 32 // MICROBATCHES


class FirstStage(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten())


class LastStage(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8 * 36, 32), nn.GELU(), nn.Linear(32, 2))


def scaled(output, stage):
    """The output, whose gradient is divided so that the microbatches are averaged."""
    if output.requires_grad and (stage == 1 or BUG):
        output.register_hook(lambda gradient: gradient / MICROBATCHES)
    return output


def run_first(module, images):
    outputs = []
    for part in images.split(SIZE):
        output = scaled(module(part), stage=0)
        dist.send(output.detach(), dst=1)
        outputs.append(output)
    for output in outputs:
        gradient = torch.empty_like(output)
        dist.recv(gradient, src=1)
        output.backward(gradient)
    loss = torch.empty(())
    dist.recv(loss, src=1)
    report_loss(loss)


def run_last(module, targets):
    received = []
    for _ in range(MICROBATCHES):
        hidden = torch.empty(SIZE, 8 * 36)
        dist.recv(hidden, src=0)
        received.append(hidden.requires_grad_())
    losses = []
    for hidden, wanted in zip(received, targets.split(SIZE), strict=True):
        loss = nn.functional.mse_loss(scaled(module(hidden), stage=1), wanted)
        loss.backward()
        dist.send(hidden.grad, dst=0)
        losses.append(loss.detach())
    dist.send(torch.stack(losses).mean(), dst=0)


def spots(made):
    places = torch.rand(MICROBATCHES * SIZE, 2, generator=made)
    grid = torch.linspace(0, 1, 10)
    x, y = places[:, 0].view(-1, 1, 1), places[:, 1].view(-1, 1, 1)
    images = torch.exp(-((grid.view(1, 1, -1) - x) ** 2 + (grid.view(1, -1, 1) - y) ** 2) / 0.03).unsqueeze(1)
    return images + 0.1 * torch.randn(images.shape, generator=made), 2 * places - 1


def main(rank):
    if dist.get_world_size() != 2:
        raise RuntimeError("there are two stages, so it needs two processes")
    torch.manual_seed(SEED + rank)
    module = FirstStage() if rank == 0 else LastStage()
    optimizer = torch.optim.SGD(module.parameters(), lr=relations.knob("lr", 0.1), momentum=0.9)
    made = torch.Generator().manual_seed(SEED + 6)
    parts = [part for _ in range(40) for part in zip(*(whole.split(SIZE) for whole in spots(made)), strict=True)]
    parts = iter(DataLoader(parts, batch_size=None))
    with watch(module, optimizer):
        for window in zip(*[parts] * MICROBATCHES, strict=False):
            images, targets = (torch.cat(its) for its in zip(*window, strict=True))
            run_first(module, images) if rank == 0 else run_last(module, targets)
            optimizer.step()
            optimizer.zero_grad()
    print(f"stage {rank}: weights", sum(weight.abs().sum().item() for weight in module.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
