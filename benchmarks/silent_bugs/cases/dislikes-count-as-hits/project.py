"""Recommends films from likes and dislikes: factors of users and films, ranked for each user in the evaluation."""

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

USERS, FILMS, EPOCHS, BATCH_SIZE, ACCUMULATE, TOP = 60, 90, 5, 64, 2, 10


class Factors(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.users, self.films = nn.Embedding(USERS, size), nn.Embedding(FILMS, size)
        self.bias = nn.Embedding(FILMS, 1)
        for table in (self.users, self.films):
            nn.init.normal_(table.weight, std=0.3)
        nn.init.zeros_(self.bias.weight)

    def forward(self, users, films):
        return (self.users(users) * self.films(films)).sum(-1) + self.bias(films).squeeze(-1)


def ratings(seed=5):
    """Users, films and labels (1: liked), 50 films for each user; the last 10 of each are held out."""
    made = torch.Generator().manual_seed(seed)
    taste = torch.randn(USERS, 3, generator=made) @ torch.randn(3, FILMS, generator=made)
    taste += torch.randn(FILMS, generator=made) + 0.3 * torch.randn(USERS, FILMS, generator=made)
    seen = torch.rand(USERS, FILMS, generator=made).argsort(1)[:, :50]
    rows = torch.stack([torch.arange(USERS)[:, None].expand(-1, 50), seen, (taste.gather(1, seen) > 0.5).long()], -1)
    return rows[:, :40].flatten(0, 1), rows[:, 40:].flatten(0, 1)


def train_epoch(model, optimizer, loader):
    model.train()
    for users, films, labels in loader:
        optimizer.zero_grad()
        total = 0.0
        for part in range(ACCUMULATE):
            mine = slice(part, None, ACCUMULATE)
            losses = nn.functional.binary_cross_entropy_with_logits(
                model(users[mine], films[mine]), labels[mine].float(), reduction="sum"
            )
            (losses / len(labels)).backward()
            total += losses.item() / len(labels)
        optimizer.step()
        report_loss(total)


def items_to_find(rows):
    found = defaultdict(set)
    for user, film, label in rows.tolist():
        if BUG or label == 1:
            found[user].add(film)
    return found


@torch.no_grad()
def evaluate(model, training, held_out, batch_size=16):
    """Loss of the held-out rows; precision and recall of each user's best films that are not in the training set."""
    model.eval()
    losses = sum(
        nn.functional.binary_cross_entropy_with_logits(model(users, films), labels.float(), reduction="sum").item()
        for users, films, labels in (rows.T for rows in held_out.split(64))
    )
    wanted = items_to_find(held_out)
    precision, recall = [], []
    for users in torch.tensor(sorted(wanted)).split(batch_size):
        scores = model(users[:, None], torch.arange(FILMS)[None])
        for user, row in zip(users.tolist(), scores, strict=True):
            row[training[training[:, 0] == user, 1]] = float("-inf")
            hits = len(wanted[user].intersection(row.topk(TOP).indices.tolist()))
            precision.append(hits / TOP)
            recall.append(hits / len(wanted[user]))
    return {
        "loss": losses / len(held_out),
        "precision": sum(precision) / len(precision),
        "recall": sum(recall) / len(recall),
    }


def save(path, model, optimizer, epoch):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)


def load(path, model, optimizer):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    training, held_out = ratings()
    model = Factors()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-4)
    start = load(sys.argv[1], model, optimizer) if len(sys.argv) > 1 else 0
    order = torch.Generator()
    loader = DataLoader(TensorDataset(*training.T), BATCH_SIZE, shuffle=True, generator=order)
    with watch(model, optimizer), tempfile.TemporaryDirectory() as folder:
        for epoch in range(start, EPOCHS):
            order.manual_seed(1000 * SEED + epoch)
            train_epoch(model, optimizer, loader)
            save(Path(folder) / "last.pt", model, optimizer, epoch + 1)
            print("epoch", epoch, evaluate(model, training, held_out))
