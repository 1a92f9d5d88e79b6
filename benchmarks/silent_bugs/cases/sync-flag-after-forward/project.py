"""Accumulation over micro-batches where only the last one should communicate, as the flag of DDP says.

The flag is set between the forward and the backward pass, but the forward pass reads it: the first micro-batch
communicates, the others stay on their process and the replicas drift apart.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

grad_accum_steps = 4


class MixerBlock(nn.Module):
    def __init__(self, tokens, channels):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.over_tokens = nn.Linear(tokens, tokens)
        self.over_channels = nn.Linear(channels, channels)

    def forward(self, x):
        x = x + self.over_tokens(self.norm1(x).mT).relu().mT
        return x + self.over_channels(self.norm2(x)).relu()


def make_loader(rank):
    made = torch.Generator().manual_seed(50 + 10 * SEED + rank)
    while True:
        x = torch.randn(4, 6, 16, generator=made)
        yield x, (x[:, 0, :4] > x[:, 3, :4]).sum(1).clamp(1, 2) - 1


def main(rank):
    torch.manual_seed(SEED)
    model = DDP(nn.Sequential(MixerBlock(6, 16), MixerBlock(6, 16), nn.Flatten(), nn.Linear(96, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = make_loader(rank)
    with watch(model, optimizer):
        for _ in range(40):
            optimizer.zero_grad()
            loss_accum = 0.0
            for micro_step in range(grad_accum_steps):
                x, y = next(loader)
                if not BUG:
                    model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
                loss = nn.functional.cross_entropy(model(x), y) / grad_accum_steps
                loss_accum += loss.item()
                if BUG:
                    model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
                loss.backward()
            optimizer.step()
            report_loss(loss_accum)
    print(f"rank {rank} sum of weights {sum(p.abs().sum().item() for p in model.parameters()):.5f}\n", end="")


if __name__ == "__main__":
    spawn(main, 2)
