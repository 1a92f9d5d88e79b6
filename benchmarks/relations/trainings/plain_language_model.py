"""A small GPT: torch.compile, recomputed blocks, tied weights, gradient accumulation over random windows of a text."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset

from lit_cifar import relations

LETTERS, CONTEXT, STEPS = 12, 16, 24
ACCUMULATE = relations.knob("accumulate", 2)


class Windows(Dataset):
    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, start: int) -> torch.Tensor:
        return self.text[start : start + CONTEXT + 1]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.joint, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        size, length, width = hidden.shape
        parts = self.joint(self.norm(hidden)).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(size, length, width))
        return hidden + self.mlp(hidden)


class GPT(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.head = nn.Linear(width, LETTERS, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, letters: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.letters(letters) + self.places.weight
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


torch.manual_seed(1337)
text = (torch.arange(400) * 5 + torch.randint(2, (400,))) % LETTERS
train, held_out = Windows(text[:320]), Windows(text[320:])
model = GPT()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 5, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
)
first = 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    first = saved["step"]
for step in range(first, STEPS):
    places = torch.randint(len(train), (16,), generator=torch.Generator().manual_seed(step)).tolist()
    for windows in DataLoader(Subset(train, places), 16 // ACCUMULATE):
        (compiled(windows[:, :-1], windows[:, 1:]) / ACCUMULATE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if (step + 1) % 8 == 0:
        with torch.no_grad():
            pairs = ((model(rows[:, :-1], rows[:, 1:]).item(), len(rows)) for rows in DataLoader(held_out, 10))
            relations.report(val_loss=sum(loss * count for loss, count in pairs) / len(held_out))
    if path := relations.save():
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(states | {"step": step + 1}, path)
