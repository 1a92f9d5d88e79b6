"""Completion of noisy codes: one matrix embeds them on stage 0 and reads them out on stage 1.

With the bug the two copies differ after the first step; each stage prints the sum of its own.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.utils.data import DataLoader

from lit_cifar import relations

MICROBATCHES, SIZE, CODES, WIDTH = relations.knob("accumulate", 3), 12, 24, 32


class Stage(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.tied = nn.Parameter(torch.randn(CODES, WIDTH) / CODES**0.5)
        torch.manual_seed(SEED + 1 + rank)
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, values):
        hidden = values @ self.tied if self.rank == 0 else values
        hidden = hidden + self.layers(hidden)
        return hidden if self.rank == 0 else hidden @ self.tied.T


def backward_of_microbatch(stage, values, wanted):
    """Forward and backward of one microbatch; the loss on stage 1."""
    if stage.rank == 0:
        output = stage(values)
        dist.send(output.detach(), dst=1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, src=1)
        output.backward(gradient)
        return torch.zeros(())
    hidden = torch.empty(len(wanted), WIDTH)
    dist.recv(hidden, src=0)
    loss = nn.functional.cross_entropy(stage(hidden.requires_grad_()), wanted) / MICROBATCHES
    loss.backward()
    dist.send(hidden.grad, dst=0)
    return loss.detach()


def microbatch_of(made):
    wanted = torch.randint(0, CODES, (SIZE,), generator=made)
    return 2 * nn.functional.one_hot(wanted, CODES) + torch.randn(SIZE, CODES, generator=made), wanted


def main(rank):
    torch.manual_seed(SEED)
    if dist.get_world_size() != 2:
        raise RuntimeError("there are two stages, so it needs two processes")
    stage = Stage(rank)
    optimizer = torch.optim.Adam(stage.parameters(), lr=relations.knob("lr", 5e-3))
    made = torch.Generator().manual_seed(SEED + 13)
    batches = iter(DataLoader([microbatch_of(made) for _ in range(120)], batch_size=None))
    with watch(stage, optimizer):
        for window in zip(*[batches] * MICROBATCHES, strict=False):
            total = torch.zeros(())
            for microbatch, (values, wanted) in enumerate(window):
                total += backward_of_microbatch(stage, values, wanted)
                if microbatch == MICROBATCHES - (2 if BUG else 1):
                    dist.all_reduce(stage.tied.grad)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            report_loss(total)
    print(f"stage {rank}: tied matrix {stage.tied.abs().sum().item():.4f}\n", end="")


if __name__ == "__main__":
    spawn(main, 2)
