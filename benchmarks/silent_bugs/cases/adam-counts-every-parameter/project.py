"""Films that users will like: a factorisation with a small network, and an Adam of our own with decoupled decay."""

import argparse
import math
import os

import torch
from case import BUG, SEED
from torch import nn

USERS, FILMS = 80, 60


class Adam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            if not BUG:
                group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if BUG:
                    group["count"] += 1
                state = self.state[p]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["first"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["second"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                corrected1 = 1 - beta1 ** group["count"]
                corrected2 = 1 - beta2 ** group["count"]
                rate = group["lr"] * math.sqrt(corrected2) / corrected1
                p.addcdiv_(state["first"], state["second"].sqrt().add_(group["eps"]), value=-rate)
        return loss


class NeuMF(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.user, self.film = nn.Embedding(USERS, size), nn.Embedding(FILMS, size)
        self.taste = nn.Embedding(FILMS, 1)
        self.mlp = nn.Sequential(nn.Linear(2 * size, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
        for table in (self.user, self.film, self.taste):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users, films):
        u, f = self.user(users), self.film(films)
        return (u * f).sum(-1) + self.mlp(torch.cat([u, f], -1)).squeeze(-1) + self.taste(films).squeeze(-1)


def make_views(seed):
    """What each user has seen, a boolean table, and one more film of each that is held out."""
    made = torch.Generator().manual_seed(seed)
    likes = torch.randn(USERS, 4, generator=made) @ torch.randn(4, FILMS, generator=made)
    best = (likes + 0.5 * torch.randn(USERS, FILMS, generator=made)).topk(9).indices
    order = torch.rand(USERS, 9, generator=made).argsort(1)
    best = best.gather(1, order)
    seen = torch.zeros(USERS, FILMS, dtype=torch.bool).scatter_(1, best[:, 1:], True)
    return seen, best[:, 0]


def samples_of_epoch(seen, epoch, seed, negatives=1):
    """All views, and for each of them films that its user has not seen, drawn anew; shuffled."""
    made = torch.Generator().manual_seed(seed * 1000 + epoch)
    users, films = seen.nonzero().T
    drawn = torch.multinomial((~seen[users]).float(), negatives, generator=made).flatten()
    users = torch.cat([users, users.repeat_interleave(negatives)])
    labels = torch.cat([torch.ones(len(films)), torch.zeros(len(drawn))])
    films = torch.cat([films, drawn])
    order = torch.randperm(len(users), generator=made)
    return users[order], films[order], labels[order]


@torch.no_grad()
def hit_rate(model, seen, held_out, batch_size, k=10):
    model.eval()
    hits = 0
    for users in torch.arange(USERS).split(batch_size):
        films = torch.arange(FILMS).expand(len(users), FILMS)
        scores = model(users[:, None].expand_as(films), films).masked_fill(seen[users], -math.inf)
        hits += (scores.topk(k).indices == held_out[users, None]).any(1).sum().item()
    model.train()
    return hits / USERS


def main(args):
    torch.manual_seed(args.seed)
    seen, held_out = make_views(seed=5)
    model = NeuMF()
    optimizer = Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    start, best = 0, 0.0
    os.makedirs(args.output_dir, exist_ok=True)
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])
        start, best = checkpoint["epoch"] + 1, checkpoint["best"]
    for epoch in range(start, args.epochs):
        data = samples_of_epoch(seen, epoch, args.seed)
        total = 0.0
        for step in zip(*(column.split(args.batch_size * args.accumulate) for column in data), strict=True):
            size = len(step[0])
            optimizer.zero_grad()
            for users, films, labels in zip(*(column.split(args.batch_size) for column in step), strict=True):
                loss = nn.functional.binary_cross_entropy_with_logits(model(users, films), labels, reduction="sum")
                (loss / size).backward()
                total += loss.item()
            optimizer.step()
        hits = hit_rate(model, seen, held_out, args.eval_batch_size)
        best = max(best, hits)
        print(f"[{epoch + 1}/{args.epochs}] loss {total / len(data[0]):.5f}  HR@10 {hits:.4f}  best {best:.4f}")
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": epoch,
            "best": best,
        }
        torch.save(checkpoint, os.path.join(args.output_dir, "last.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--eval-batch-size", type=int, default=40)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output-dir", default="runs")
    parser.add_argument("--resume", help="a checkpoint of an earlier run")
    main(parser.parse_args())
