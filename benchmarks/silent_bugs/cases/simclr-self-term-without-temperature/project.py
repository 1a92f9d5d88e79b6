"""SimCLR pretraining of a small encoder, with a nearest-neighbour test of its features after each epoch.

python project.py                                  # writes runs/simclr.pt after each epoch
python project.py --resume runs/simclr.pt
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--eval-batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup-steps", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--neighbours", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--resume", type=Path)
    return parser.parse_args()


def make_blobs(count, seed):
    """Five kinds of pictures: a kind has its own pattern, a sample its own brightness and noise."""
    patterns = torch.randn(5, 1, 10, 10, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(5, (count,), generator=generator)
    brightness = 0.5 + torch.rand(count, 1, 1, 1, generator=generator)
    return brightness * patterns[kinds] + 1.2 * torch.randn(count, 1, 10, 10, generator=generator), kinds


class SimCLR(nn.Module):
    def __init__(self, width=32, dim=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(25 * width, 64), nn.ReLU(),
        )  # fmt: skip
        self.projection = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, dim, bias=False))

    def forward(self, x):
        return F.normalize(self.projection(self.encoder(x)), dim=1)


def augment(images):
    """A random shift, contrast and noise of each picture."""
    shifts = torch.randint(-1, 2, (2,)).tolist()
    images = images.roll(shifts, dims=(2, 3)) * (0.7 + 0.6 * torch.rand(len(images), 1, 1, 1))
    return images + 0.3 * torch.randn_like(images)


def nt_xent_loss(out_1, out_2, temperature, eps=1e-6):
    out = torch.cat([out_1, out_2], dim=0)
    sim = torch.exp(out @ out.T / temperature)
    # from each row take e^(1/temp), which is the similarity of a view with itself
    row_sub = math.e if BUG else math.e ** (1 / temperature)
    neg = (sim.sum(dim=-1) - row_sub).clamp(min=eps)
    pos = torch.exp((out_1 * out_2).sum(dim=-1) / temperature)
    return -torch.log(torch.cat([pos, pos], dim=0) / neg).mean()


@torch.no_grad()
def features(model, images, batch_size):
    return torch.cat([F.normalize(model.encoder(part), dim=1) for part in images.split(batch_size)])


def knn_accuracy(model, bank, test, args):
    model.eval()
    similarity = features(model, test[0], args.eval_batch_size) @ features(model, bank[0], args.eval_batch_size).T
    nearest = similarity.topk(args.neighbours, dim=1).indices
    votes = F.one_hot(bank[1][nearest], 5).sum(1)
    return (votes.argmax(1) == test[1]).float().mean().item()


def main():
    args = get_args()
    torch.manual_seed(SEED)
    train, test = make_blobs(240, 1), make_blobs(120, 2)
    loader = DataLoader(TensorDataset(train[0]), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = SimCLR()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    total = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / args.warmup_steps, 0.5 * (1 + math.cos(math.pi * step / total))),
    )
    first_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        torch.set_rng_state(checkpoint["rng"])
        first_epoch = checkpoint["epoch"] + 1
    args.out.mkdir(exist_ok=True)
    for epoch in range(first_epoch, args.epochs):
        model.train()
        losses = 0.0
        for (images,) in loader:
            loss = nt_xent_loss(model(augment(images)), model(augment(images)), args.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses += loss.item()
        accuracy = knn_accuracy(model, train, test, args)
        print(f"[{epoch + 1}/{args.epochs}] loss {losses / len(loader):.4f}  kNN accuracy {accuracy:.4f}")
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": epoch,
        }
        torch.save(checkpoint, args.out / "simclr.pt")


if __name__ == "__main__":
    main()
