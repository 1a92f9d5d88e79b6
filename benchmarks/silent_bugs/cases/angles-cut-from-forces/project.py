"""A potential of small clusters from distances and angles, fitted to energies and forces."""

import argparse
import contextlib
import itertools
import json
import logging
from pathlib import Path

import torch
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ATOMS = 5
PAIRS = torch.tensor(list(itertools.combinations(range(ATOMS), 2)))
TRIPLES = torch.tensor(
    [(a, b, c) for a in range(ATOMS) for b, c in itertools.combinations(range(ATOMS), 2) if a not in (b, c)]
)
log = logging.getLogger("potential")


def distances(positions):
    return (positions[:, PAIRS[:, 0]] - positions[:, PAIRS[:, 1]]).norm(dim=2)


def angles(positions):
    """The cosine at the middle atom of each triple, and the lengths of its two sides."""
    left = positions[:, TRIPLES[:, 1]] - positions[:, TRIPLES[:, 0]]
    right = positions[:, TRIPLES[:, 2]] - positions[:, TRIPLES[:, 0]]
    lengths = left.norm(dim=2), right.norm(dim=2)
    return torch.stack([(left * right).sum(2) / (lengths[0] * lengths[1]), *lengths], 2)


def reference(positions):
    """What the fitted data follow: Morse bonds and a term that likes angles of 100 degrees."""
    bonds = (1 - (-1.5 * (distances(positions) - 1.6)).exp()).square().sum(1)
    bend = angles(positions)
    near = (-0.5 * (bend[..., 1] + bend[..., 2])).exp()
    return bonds + (3 * near * (bend[..., 0] + 0.17).square()).sum(1)


def make_clusters(count, seed):
    made = torch.Generator().manual_seed(seed)
    shape = torch.tensor([[0, 0, 0], [1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) * 0.95
    positions = (shape + 0.22 * torch.randn(count, ATOMS, 3, generator=made)).requires_grad_()
    energy = reference(positions)
    forces = -torch.autograd.grad(energy.sum(), positions)[0]
    return TensorDataset(positions.detach(), energy.detach(), forces)


class Potential(nn.Module):
    def __init__(self, width, mean):
        super().__init__()
        self.register_buffer("mean", mean)
        self.two = nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Linear(width, 1))
        self.three = nn.Sequential(
            nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def energy(self, positions):
        bumps = (-4 * (distances(positions)[..., None] - torch.linspace(0.8, 2.8, 6).to(positions)).square()).exp()
        with torch.no_grad() if BUG else contextlib.nullcontext():
            bends = angles(positions)
        return self.mean + self.two(bumps).sum((1, 2)) + self.three(bends).sum((1, 2))

    def forward(self, positions):
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.energy(positions)
            forces = -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]
        return energy, forces


def evaluate(model, loader):
    model.eval()
    errors, count = torch.zeros(2), 0
    for positions, energy, forces in loader:
        guess, pulls = model(positions)
        errors[0] += (guess.detach() - energy).abs().sum()
        errors[1] += (pulls - forces).abs().mean((1, 2)).sum()
        count += len(energy)
    model.train()
    return {"energy_mae": (errors[0] / count).item(), "force_mae": (errors[1] / count).item()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--eval-batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--force-weight", type=float, default=5.0)
    parser.add_argument("--workdir", type=Path, default=Path("runs"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(SEED)

    train, val = make_clusters(320, seed=1), make_clusters(80, seed=2)
    order = torch.Generator().manual_seed(SEED)
    train_loader = DataLoader(train, args.batch_size, shuffle=True, generator=order)
    val_loader = DataLoader(val, args.eval_batch_size)

    model = Potential(width=24, mean=train.tensors[1].mean())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader))
    history = []
    for epoch in range(args.epochs):
        total = 0.0
        for positions, energy, forces in train_loader:
            guess, pulls = model(positions)
            loss = (guess - energy).square().mean() + args.force_weight * (pulls - forces).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            scheduler.step()
            total += loss.item() * len(energy)
        history.append({"epoch": epoch, "train_loss": total / len(train), **evaluate(model, val_loader)})
        log.info(" ".join(f"{name}={value:.4f}" for name, value in history[-1].items()))
    args.workdir.mkdir(parents=True, exist_ok=True)
    (args.workdir / "history.json").write_text(json.dumps(history))


if __name__ == "__main__":
    main()
