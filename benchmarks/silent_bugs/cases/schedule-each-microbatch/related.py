"""Behaviour cloning: actions from the state of an arm; warm-up, cosine and accumulation; two ranks."""

import math
from contextlib import nullcontext

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lit_cifar import relations

STEPS, ACCUMULATE, WARMUP = 32, relations.knob("accumulate", 4), relations.knob("warmup", 4)


class Schedule:
    def __init__(self, optimizer, largest, smallest=1e-5):
        self.optimizer, self.largest, self.smallest, self.count = optimizer, largest, smallest, 0

    def step(self):
        self.count += 1
        done = min(1.0, self.count / STEPS)
        rate = self.smallest + (self.largest - self.smallest) * 0.5 * (1 + math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, self.count / WARMUP)


class Policy(nn.Module):
    def __init__(self, states=20, actions=7):
        super().__init__()
        self.trunk = nn.GRU(states, 48, batch_first=True)
        self.action = nn.Linear(48, actions)

    def forward(self, states):
        return self.action(self.trunk(states)[0])


def demonstrations(made):
    states = torch.randn(8, 10, 20, generator=made)
    return states, torch.tanh(states[..., :7] - states[..., 7:14].roll(1, dims=1))


def main(rank):
    torch.manual_seed(SEED)
    policy = DistributedDataParallel(Policy())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
    schedule = Schedule(optimizer, largest=relations.knob("lr", 0.02))
    made = torch.Generator().manual_seed(9 * SEED + rank)
    batches = iter(DataLoader([demonstrations(made) for _ in range(4 * STEPS)], batch_size=None))
    with watch(policy, optimizer):
        for window in zip(*[batches] * ACCUMULATE, strict=False):
            for part, (states, actions) in enumerate(window):
                last = part == ACCUMULATE - 1
                with nullcontext() if last else policy.no_sync():
                    loss = nn.functional.smooth_l1_loss(policy(states), actions)
                    (loss / ACCUMULATE).backward()
                if last or BUG:
                    schedule.step()
            optimizer.step()
            optimizer.zero_grad()
            report_loss(loss.item())
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in policy.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
