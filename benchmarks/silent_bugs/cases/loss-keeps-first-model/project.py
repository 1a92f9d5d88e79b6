"""Train a sentence encoder with in-batch negatives.

python project.py --out runs
python project.py --out runs --resume runs/epoch_2.pt
"""

import argparse
from pathlib import Path

import torch
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH = 60, 10


def make_pairs(count, seed):
    """Questions and answers about the same topics."""
    made = torch.Generator().manual_seed(seed)
    mapping = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(11))
    questions = torch.randint(VOCABULARY, (count, LENGTH), generator=made)
    shuffled = torch.rand(count, LENGTH, generator=made).argsort(1)
    answers = mapping[questions].gather(1, shuffled)
    noise = torch.randint(VOCABULARY, (count, LENGTH), generator=made)
    return TensorDataset(questions, torch.where(torch.rand(count, LENGTH, generator=made) < 0.3, noise, answers))


class SentenceEncoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.project = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, tokens):
        return nn.functional.normalize(self.project(self.embedding(tokens).mean(1)), dim=1)

    @classmethod
    def from_checkpoint(cls, state):
        model = cls()
        model.load_state_dict(state)
        return model


class RankingLoss(nn.Module):
    """Each question's answer against the other answers of the batch."""

    def __init__(self, model, scale=20.0):
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, questions, answers):
        scores = self.scale * self.model(questions) @ self.model(answers).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


@torch.no_grad()
def retrieval_accuracy(model, pairs):
    """How often a question's own answer is the nearest of all."""
    model.eval()
    questions, answers = pairs.tensors
    nearest = (model(questions) @ model(answers).T).argmax(1)
    model.train()
    return (nearest == torch.arange(len(nearest))).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--out", default="runs")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    order = torch.Generator().manual_seed(SEED)
    loader = DataLoader(make_pairs(256, seed=1), args.batch_size, shuffle=True, generator=order)
    val_pairs = make_pairs(96, seed=2)

    model = SentenceEncoder()
    criterion = RankingLoss(model)
    checkpoint = torch.load(args.resume, weights_only=True) if args.resume else None
    if checkpoint:
        model = SentenceEncoder.from_checkpoint(checkpoint["model"])
        if not BUG:
            criterion.model = model
    optimizer = torch.optim.Adam(criterion.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, args.epochs * len(loader))
    start = 0
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        order.set_state(checkpoint["order"])
        start = checkpoint["epoch"] + 1
        print(f"resumed from {args.resume}, epoch {start}")

    for epoch in range(start, args.epochs):
        total = count = 0
        for questions, answers in loader:
            loss = criterion(questions, answers)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item() * len(questions)
            count += len(questions)
        accuracy = retrieval_accuracy(model, val_pairs)
        print(f"epoch {epoch} loss {total / count:.4f} accuracy@1 {accuracy:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "order": order.get_state(),
            "epoch": epoch,
        }
        torch.save(state, out / f"epoch_{epoch}.pt")


if __name__ == "__main__":
    main()
