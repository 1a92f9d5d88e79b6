"""A GAN with non-saturating loss and lazy R1 regularization that draws rings, in the style of StyleGAN2.

--batch samples are a step; at most --batch-gpu of them are in memory at once, the rest is accumulated.
"""

import argparse
import copy
import json
import os

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Z_DIM = 8


def make_rings(count):
    generator = torch.Generator().manual_seed(5)
    center = 4.5 + torch.randn(count, 2, 1, 1, generator=generator)
    radius = 2 + 1.5 * torch.rand(count, 1, 1, generator=generator)
    grid = torch.arange(10.0)
    distance = ((grid[:, None] - center[:, 0]) ** 2 + (grid[None] - center[:, 1]) ** 2).sqrt()
    return (2 * torch.exp(-((distance - radius) ** 2)) - 1)[:, None]


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(Z_DIM, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
            nn.Linear(64, 100), nn.Tanh(), nn.Unflatten(1, (1, 10, 10)),
        )  # fmt: skip


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.Linear(16 * 25, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1),
        )  # fmt: skip


def endless(loader):
    while True:
        for (reals,) in loader:
            yield reals


def r1_penalty(D, reals, gamma):
    reals = reals.detach().requires_grad_(True)
    (grads,) = torch.autograd.grad(D(reals).sum(), reals, create_graph=True)
    return grads.square().sum([1, 2, 3]).mean() * gamma / 2


@torch.no_grad()
def evaluate(G, reals, latents):
    """Distances of the mean picture and of the mean spread to those of the data."""
    G.eval()
    fakes = torch.cat([G(z) for z in latents.split(32)])
    mean = (fakes.mean(0) - reals.mean(0)).square().mean().item()
    spread = (fakes.std(0) - reals.std(0)).square().mean().item()
    return {"mean_distance": mean, "spread_distance": spread}


def training_loop(args):
    torch.manual_seed(SEED)
    data = make_rings(160)
    batch_gpu = args.batch_gpu
    num_rounds = args.batch // batch_gpu
    train_iterator = endless(DataLoader(TensorDataset(data), batch_size=batch_gpu, shuffle=True))
    eval_latents = torch.randn(96, Z_DIM, generator=torch.Generator().manual_seed(6))
    G, D = Generator(), Discriminator()
    G_ema = copy.deepcopy(G).requires_grad_(False)
    G_opt = torch.optim.Adam(G.parameters(), lr=args.lr, betas=(0.0, 0.99), eps=1e-8)
    D_opt = torch.optim.Adam(D.parameters(), lr=args.lr, betas=(0.0, 0.99), eps=1e-8)
    history = []

    for step in range(args.steps):
        all_latents = torch.randn(2, num_rounds * batch_gpu, Z_DIM)  # of the generator's phase, of the discriminator's
        G_latents, D_latents = (z.split(batch_gpu) for z in all_latents)

        # generator
        D.requires_grad_(False)
        G_opt.zero_grad()
        G_total = 0.0
        for z in G_latents:
            loss = F.softplus(-D(G(z))).mean() / num_rounds
            loss.backward()
            G_total += loss.item()
        G_opt.step()
        D.requires_grad_(True)
        with torch.no_grad():
            for average, current in zip(G_ema.parameters(), G.parameters(), strict=False):
                average.lerp_(current, 1 - args.ema_beta)

        # discriminator
        D_opt.zero_grad()
        D_total, rounds = 0.0, []
        for z in D_latents:
            reals = next(train_iterator)
            rounds.append(reals)
            with torch.no_grad():
                fakes = G(z)
            loss = (F.softplus(D(fakes)) + F.softplus(-D(reals))).mean() / num_rounds
            loss.backward()
            D_total += loss.item()
        D_opt.step()

        # its regularization, as a step of its own
        if step % args.d_reg_interval == 0:
            D_opt.zero_grad()
            for round_reals in rounds:
                penalty = r1_penalty(D, reals if BUG else round_reals, args.gamma)
                (penalty * args.d_reg_interval / num_rounds).backward()
            D_opt.step()

        if (step + 1) % args.snapshot == 0:
            metrics = evaluate(G_ema, data, eval_latents)
            history.append({"step": step + 1, "G_loss": G_total, "D_loss": D_total, **metrics})
            print("  ".join(f"{name} {value:.5g}" for name, value in history[-1].items()))

    os.makedirs(args.outdir, exist_ok=True)
    torch.save({"G": G.state_dict(), "D": D.state_dict(), "G_ema": G_ema.state_dict()}, f"{args.outdir}/network.pt")
    with open(f"{args.outdir}/metrics.jsonl", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in history)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--outdir", default="runs")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batch-gpu", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--gamma", type=float, default=2.0)
    parser.add_argument("--d-reg-interval", type=int, default=4)
    parser.add_argument("--ema-beta", type=float, default=0.9)
    parser.add_argument("--snapshot", type=int, default=20)
    training_loop(parser.parse_args())


if __name__ == "__main__":
    main()
