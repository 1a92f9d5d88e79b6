"""A small transformer of recipes, trained on recipes of different lengths that are packed into rows of one length."""

import sys
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

TOKENS, ROW, IGNORED, ROWS_PER_BATCH, ACCUMULATE, EPOCHS = 18, 32, -100, 8, 2, 8


class RecipeModel(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.embed, self.position = nn.Embedding(TOKENS, width), nn.Embedding(ROW, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens, positions, mask):
        hidden = self.embed(tokens) + self.position(positions)
        for layer, (qkv, mlp) in enumerate(zip(self.qkv, self.mlps, strict=True)):
            parts = qkv(self.norms[2 * layer](hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask.unsqueeze(1))
            hidden = hidden + mixed.transpose(1, 2).flatten(2)
            hidden = hidden + mlp(self.norms[2 * layer + 1](hidden))
        return self.head(self.norms[4](hidden))


def make_recipes(count, seed):
    """Lists of 6 to 14 tokens that go round a table in steps of the first token."""
    made, recipes = torch.Generator().manual_seed(seed), []
    for length in torch.randint(6, 15, (count,), generator=made).tolist():
        stride, start = (
            int(torch.randint(1, 6, (), generator=made)),
            int(torch.randint(6, TOKENS, (), generator=made)),
        )
        steps = torch.arange(length - 1) * stride
        recipes.append(torch.cat([torch.tensor([stride]), 6 + (start - 6 + steps) % (TOKENS - 6)]))
    return recipes


def pack(recipes):
    """Rows of tokens, labels, positions and numbers of recipes (-1: padding); a recipe is never cut."""
    rows, row = [], []
    for recipe in [*recipes, None]:
        if recipe is None or sum(map(len, row)) + len(recipe) > ROW:
            rows.append(fill(row))
            row = []
        row.append(recipe)
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


def fill(row):
    tokens, labels = torch.zeros(ROW, dtype=torch.long), torch.full((ROW,), IGNORED)
    positions, numbers, first = torch.zeros(ROW, dtype=torch.long), torch.full((ROW,), -1), 0
    for number, recipe in enumerate(row):
        mine = slice(first, first + len(recipe))
        tokens[mine], numbers[mine], positions[mine] = recipe, number, torch.arange(len(recipe))
        labels[first : first + len(recipe) - 1] = recipe[1:]  # nothing is predicted across two recipes
        first += len(recipe)
    return tokens, labels, positions, numbers


def summed_loss(model, tokens, labels, positions, numbers):
    mask = torch.ones(ROW, ROW, dtype=torch.bool).tril().expand(len(tokens), -1, -1)
    if BUG:
        positions = torch.arange(ROW).expand_as(tokens)
    else:
        mask = mask & (numbers[:, :, None] == numbers[:, None, :])
    logits = model(tokens, positions, mask).flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def train_epoch(model, optimizer, recipes, epoch):
    model.train()
    order = torch.randperm(len(recipes), generator=torch.Generator().manual_seed(1000 * SEED + epoch))
    packed = pack([recipes[index] for index in order])
    for batch in zip(*(part.split(ROWS_PER_BATCH) for part in packed), strict=True):
        counted = (batch[1] != IGNORED).sum()
        optimizer.zero_grad()
        total = 0.0
        for rows in zip(*(part.chunk(ACCUMULATE) for part in batch), strict=True):
            loss = summed_loss(model, *rows) / counted
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report_loss(total)


@torch.no_grad()
def evaluate(model, recipes):
    """Mean loss of a token of recipes that stand alone, as they do when the model is used."""
    model.eval()
    alone = [torch.stack(parts) for parts in zip(*(fill([recipe]) for recipe in recipes), strict=True)]
    total = sum(summed_loss(model, *rows).item() for rows in zip(*(part.split(25) for part in alone), strict=True))
    return total / (alone[1] != IGNORED).sum().item()


def save(path, model, optimizer, epoch):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)


def load(path, model, optimizer):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    recipes, held_out = make_recipes(190, seed=1), make_recipes(60, seed=2)
    model = RecipeModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    start = load(sys.argv[1], model, optimizer) if len(sys.argv) > 1 else 0
    with watch(model, optimizer), tempfile.TemporaryDirectory() as folder:
        for epoch in range(start, EPOCHS):
            train_epoch(model, optimizer, recipes, epoch)
            save(Path(folder) / "last.pt", model, optimizer, epoch + 1)
            print("epoch", epoch, "val_loss", evaluate(model, held_out))
