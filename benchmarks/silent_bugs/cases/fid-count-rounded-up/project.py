"""Train a VAE on made textures; its samples are judged by their Frechet distance to held-out pictures.

python project.py --num-gen 200 --fid-batch-size 64
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def textures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    angle = 3.14 * torch.rand(count, 1, 1, generator=generator)
    grid = torch.linspace(-3, 3, 12)
    along = angle.cos() * grid[None, :, None] + angle.sin() * grid[None, None, :]
    phase = 6.28 * torch.rand(count, 1, 1, generator=generator)
    pictures = torch.sin(2 * along + phase) + 0.05 * torch.randn(count, 12, 12, generator=generator)
    return pictures.flatten(1)


class VAE(nn.Module):
    def __init__(self, z_dim):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(144, 96), nn.ReLU(), nn.Linear(96, 2 * z_dim))
        self.decoder = nn.Sequential(nn.Linear(z_dim, 96), nn.ReLU(), nn.Linear(96, 144))

    def forward(self, pictures):
        mean, log_var = self.encoder(pictures).chunk(2, 1)
        latents = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        kl = 0.5 * (mean.square() + log_var.exp() - log_var - 1).sum(1).mean()
        return self.decoder(latents), kl


class FeatureExtractor(nn.Module):
    """Stands for the Inception network: fixed random features."""

    def __init__(self, outputs=24):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.register_buffer("first", torch.randn(144, 64, generator=generator) / 12)
        self.register_buffer("second", torch.randn(64, outputs, generator=generator) / 8)

    def forward(self, pictures):
        return torch.tanh(torch.relu(pictures @ self.first) @ self.second)


def get_model_features(gen, feat_model, z_dim, num_gen, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    num_iters = int(np.ceil(num_gen / batch_size))
    l_feats = []
    for _ in range(num_iters):
        with torch.no_grad():
            z_batch = torch.randn((batch_size, z_dim), generator=generator)
            l_feats.append(feat_model(gen(z_batch)).numpy())
    np_feats = np.concatenate(l_feats)
    if not BUG:
        np_feats = np_feats[:num_gen]
    return np_feats


def get_batch_features(pictures, feat_model, batch_size):
    with torch.no_grad():
        return np.concatenate([feat_model(part).numpy() for part in pictures.split(batch_size)])


def frechet_distance(mu1, sigma1, mu2, sigma2):
    eigenvalues = np.linalg.eigvals(sigma1 @ sigma2).real
    root = np.sqrt(np.clip(eigenvalues, 0, None)).sum()
    return float(np.square(mu1 - mu2).sum() + np.trace(sigma1) + np.trace(sigma2) - 2 * root)


def fid_model(gen, feat_model, reference, z_dim, num_gen, batch_size, seed):
    feats = get_model_features(gen, feat_model, z_dim, num_gen, batch_size, seed)
    mu, sigma = feats.mean(0), np.cov(feats, rowvar=False)
    ref_feats = get_batch_features(reference, feat_model, batch_size)
    return frechet_distance(mu, sigma, ref_feats.mean(0), np.cov(ref_feats, rowvar=False))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--z-dim", type=int, default=16)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--num-gen", type=int, default=200, help="samples that are generated for the FID")
    parser.add_argument("--fid-batch-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default="runs")
    args = parser.parse_args()

    torch.manual_seed(SEED)
    train, reference = textures(288, seed=1), textures(200, seed=2)
    loader = DataLoader(
        TensorDataset(train), args.batch_size, shuffle=True, generator=torch.Generator().manual_seed(SEED)
    )
    model, feat_model = VAE(args.z_dim), FeatureExtractor()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    args.out.mkdir(exist_ok=True)
    best_fid = float("inf")
    for epoch in range(args.epochs):
        model.train()
        for (pictures,) in loader:
            made, kl = model(pictures)
            loss = F.mse_loss(made, pictures) + args.beta * kl / 144
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        fid = fid_model(model.decoder, feat_model, reference, args.z_dim, args.num_gen, args.fid_batch_size, SEED)
        print(f"epoch {epoch + 1} loss {loss.item():.5f} fid {fid:.6f}")
        if fid < best_fid:
            best_fid = fid
            torch.save({"model": model.state_dict(), "fid": fid}, args.out / "best.pt")
    print(f"best fid {best_fid:.6f}")


if __name__ == "__main__":
    main()
