"""A transformer with dropout whose blocks are recomputed in the backward; two ranks."""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lit_cifar import relations


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden):
        normed = self.norm1(hidden)
        hidden = hidden + self.dropout(self.attention(normed, normed, normed, need_weights=False)[0])
        return hidden + self.dropout(self.mlp(self.norm2(hidden)))


class Transformer(nn.Module):
    def __init__(self, width=32, depth=3, dropout=0.2):
        super().__init__()
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=not BUG)
        return self.head(hidden.mean(1))


def main(rank):
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Transformer(dropout=relations.knob("dropout", 0.2)))
    torch.manual_seed(SEED + 1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 3e-3))
    made = torch.Generator().manual_seed(SEED + 60)
    with watch(model, optimizer):
        for _ in range(40):
            tokens = relations.share(torch.randn(48, 6, 8, generator=made))
            targets = tokens[..., :2].sum((1, 2)).unsqueeze(1) / 2
            loss = nn.functional.mse_loss(model(tokens), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(loss.item())
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
