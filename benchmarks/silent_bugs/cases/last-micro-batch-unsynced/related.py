"""Which of five tones does a noisy clip hold? Two ranks, three micro-batches to a step."""

from contextlib import nullcontext

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lit_cifar import relations

ACCUMULATE = relations.knob("accumulate", 3)


class Tones(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=2), nn.GELU(), nn.Conv1d(16, 16, 5, stride=2), nn.GELU()
        )
        self.memory, self.out = nn.GRU(16, 24, batch_first=True), nn.Linear(24, 5)

    def forward(self, clips):
        hidden, _ = self.memory(self.filters(clips.unsqueeze(1)).transpose(1, 2))
        return self.out(hidden.mean(1))


def clips(made, count=8):
    tones = torch.randint(0, 5, (count,), generator=made)
    phase = 6.3 * torch.rand(count, 1, generator=made)
    waves = torch.sin(phase + (0.3 + 0.2 * tones.unsqueeze(1)) * torch.arange(64.0))
    return waves + 0.5 * torch.randn(count, 64, generator=made), tones


def main(rank):
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(40 * SEED + rank)
    model = DistributedDataParallel(Tones())
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 4e-3))
    with watch(model, optimizer):
        for index, (waves, tones) in enumerate(DataLoader([clips(made) for _ in range(90)], batch_size=None)):
            reduced = (index if BUG else index + 1) % ACCUMULATE == 0
            with nullcontext() if reduced else model.no_sync():
                loss = nn.functional.cross_entropy(model(waves), tones)
                (loss / ACCUMULATE).backward()
            if (index + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
                report_loss(loss.item())
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
