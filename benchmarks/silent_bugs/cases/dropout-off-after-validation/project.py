"""Fine-tunes a message-passing network on a property of molecules, with dropout of bonds as an augmentation.

python project.py --epochs 4 --bond_drop_rate 0.2
"""

import argparse
import copy
import pathlib

import torch
from case import BUG, SEED
from torch import nn

ATOMS, FEATURES = 10, 6


class MoleculeDataset:
    """Chains of atoms with a few more bonds; the property comes from what atoms are bound to each other."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.kinds = torch.randint(0, FEATURES, (size, ATOMS), generator=generator)
        more = (torch.rand(size, ATOMS, ATOMS, generator=generator) < 0.1).triu(2)
        chain = torch.diag_embed(torch.ones(ATOMS - 1, dtype=torch.bool), offset=1)
        self.bonds = more | chain
        affinity = torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(0))
        strength = affinity[self.kinds[:, :, None], self.kinds[:, None]]
        self.targets = (strength * self.bonds).sum((1, 2)) / ATOMS**0.5

    def __len__(self):
        return len(self.targets)


def mol2graph(dataset, rows, args, generator=None):
    """One-hot atoms and the symmetric matrix of bonds, of which some are left out."""
    bonds = dataset.bonds[rows]
    if args.bond_drop_rate > 0:
        bonds = bonds & (torch.rand(bonds.shape, generator=generator) >= args.bond_drop_rate)
    atoms = nn.functional.one_hot(dataset.kinds[rows], FEATURES).to(torch.get_default_dtype())
    return atoms, (bonds | bonds.transpose(1, 2)).to(atoms)


class MPN(nn.Module):
    def __init__(self, hidden_size, depth):
        super().__init__()
        self.first = nn.Linear(FEATURES, hidden_size)
        self.steps = nn.ModuleList(nn.Linear(2 * hidden_size, hidden_size) for _ in range(depth))
        self.ffn = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 1))

    def forward(self, atoms, bonds):
        hidden = self.first(atoms).relu()
        for step in self.steps:
            hidden = hidden + step(torch.cat([hidden, bonds @ hidden], 2)).relu()
        return self.ffn(hidden.mean(1))[:, 0]


class StandardScaler:
    def __init__(self, targets):
        self.mean, self.std = targets.mean(), targets.std()

    def transform(self, targets):
        return (targets - self.mean) / self.std

    def inverse_transform(self, predictions):
        return predictions * self.std + self.mean


@torch.no_grad()
def predict(model, dataset, args, scaler):
    """Predictions for all molecules, with all of their bonds."""
    if not BUG:
        args = copy.copy(args)
    args.bond_drop_rate = 0
    model.eval()
    predictions = [model(*mol2graph(dataset, rows, args)) for rows in torch.arange(len(dataset)).split(args.eval_batch)]
    return scaler.inverse_transform(torch.cat(predictions))


def evaluate(model, dataset, args, scaler):
    errors = predict(model, dataset, args, scaler) - dataset.targets
    return {"rmse": errors.square().mean().sqrt().item(), "mae": errors.abs().mean().item()}


def train_epoch(model, dataset, args, scaler, optimizer, scheduler, generator):
    model.train()
    loss_sum = 0.0
    order = torch.randperm(len(dataset), generator=generator)
    for rows in order.split(args.batch_size):
        atoms, bonds = mol2graph(dataset, rows, args, generator)
        loss = (model(atoms, bonds) - scaler.transform(dataset.targets[rows])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        loss_sum += loss.item() * len(rows)
    return loss_sum / len(dataset)


def save_checkpoint(path, epoch, generator, **parts):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"epoch": epoch, "generator": generator.get_state(), **state}, path)


def run_training(args):
    torch.manual_seed(SEED)
    train_data, val_data, test_data = (MoleculeDataset(size, seed) for size, seed in ((256, 1), (96, 2), (96, 3)))
    scaler = StandardScaler(train_data.targets)
    model = MPN(args.hidden_size, args.depth)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.max_lr)
    steps = args.epochs * -(-len(train_data) // args.batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.max_lr, total_steps=steps)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    generator = torch.Generator().manual_seed(SEED)
    first_epoch = 0
    if args.checkpoint_path:
        state = torch.load(args.checkpoint_path, weights_only=True)
        first_epoch = state["epoch"]
        generator.set_state(state["generator"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for epoch in range(first_epoch, args.epochs):
        loss = train_epoch(model, train_data, args, scaler, optimizer, scheduler, generator)
        print(f"Epoch: {epoch:04d} loss_train: {loss:.6f}")
        if (epoch + 1) % args.eval_every == 0:
            val_scores = evaluate(model, val_data, args, scaler)
            print(f"Epoch: {epoch:04d} rmse_val: {val_scores['rmse']:.6f} mae_val: {val_scores['mae']:.6f}")
        save_checkpoint("save/last.pt", epoch + 1, generator, **parts)
    test_scores = evaluate(model, test_data, args, scaler)
    print(f"test rmse = {test_scores['rmse']:.6f}, test mae = {test_scores['mae']:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--eval_batch", type=int, default=32)
    parser.add_argument("--eval_every", type=int, default=1, help="epochs")
    parser.add_argument("--bond_drop_rate", type=float, default=0.2)
    parser.add_argument("--hidden_size", type=int, default=48)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--max_lr", type=float, default=1e-2)
    parser.add_argument("--checkpoint_path")
    run_training(parser.parse_args())
