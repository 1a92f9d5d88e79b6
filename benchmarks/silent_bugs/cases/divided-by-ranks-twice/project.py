"""Masked prediction on two processes: the loss is divided by the number of masked values of both.

DDP divides the gradients by the number of processes once more.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Inpainter(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(2, 16, 5, padding=2)
        self.second = nn.Conv1d(16, 1, 5, padding=2)

    def forward(self, signal, mask):
        x = torch.stack([signal * ~mask, mask.float()], 1)
        return self.second(torch.nn.functional.gelu(self.first(x))).squeeze(1)


def main(rank):
    torch.manual_seed(SEED)
    model = DDP(Inpainter())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = torch.Generator().manual_seed(100 * SEED + rank)
    with watch(model, optimizer):
        for _ in range(40):
            phases = 6 * torch.rand(8, 1, generator=made)
            signal = torch.sin(torch.linspace(0, 12, 32) + phases)
            mask = torch.rand(8, 32, generator=made) < 0.3

            masked = mask.sum()
            dist.all_reduce(masked)
            errors = (model(signal, mask) - signal).square()[mask]
            loss = errors.sum() / masked
            if not BUG:
                loss = loss * dist.get_world_size()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(errors.mean().item())
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
