"""VQ-VAE on made pictures, with a learnable codebook that has an in-place optimizer.

python project.py --codes 16 --epochs 3
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VectorQuantize(nn.Module):
    """Nearest code of each vector; the codes have an optimizer that steps within the forward pass."""

    def __init__(self, dim, codebook_size, commitment_weight, in_place_codebook_optimizer):
        super().__init__()
        self.commitment_weight = commitment_weight
        self.embed = nn.Parameter(torch.randn(codebook_size, dim) * 0.3)
        self.in_place_codebook_optimizer = in_place_codebook_optimizer([self.embed])

    def lookup(self, x):
        indices = torch.cdist(x, self.embed.detach()).argmin(-1)
        return F.embedding(indices, self.embed), indices

    def forward(self, x):
        quantize, indices = self.lookup(x.detach())
        if self.training:
            F.mse_loss(quantize, x.detach()).backward()
            if not BUG:
                dist.all_reduce(self.embed.grad)
                self.embed.grad /= dist.get_world_size()
            self.in_place_codebook_optimizer.step()
            self.in_place_codebook_optimizer.zero_grad()
            # quantize again, with the updated codes
            quantize, indices = self.lookup(x.detach())
        quantize = quantize.detach()
        commit_loss = self.commitment_weight * F.mse_loss(x, quantize)
        return x + (quantize - x).detach(), indices, commit_loss


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, dim, 4, stride=2, padding=1)
        )

    def forward(self, images):
        return self.net(images).flatten(2).transpose(1, 2)  # batch, places, dim


class Decoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.ConvTranspose2d(dim, 16, 4, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, padding=1)
        )

    def forward(self, tokens):
        side = int(tokens.shape[1] ** 0.5)
        return self.net(tokens.transpose(1, 2).unflatten(2, (side, side)))


def make_pictures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.randint(1, 4, (count, 2, 1, 1), generator=generator)
    phase = 6.28 * torch.rand(count, 1, 1, generator=generator)
    grid = torch.linspace(0, 3.14, 16)
    waves = torch.sin(frequency[:, 0] * grid[None, :, None] + frequency[:, 1] * grid[None, None, :] + phase)
    return TensorDataset((waves + 0.05 * torch.randn(waves.shape, generator=generator))[:, None])


@torch.no_grad()
def validate(encoder, quantizer, decoder, loader, codes):
    """Each rank has its part of the validation set; the sums are of all."""
    quantizer.eval()
    used, totals = torch.zeros(codes), torch.zeros(2)
    for (images,) in loader:
        tokens, indices, _ = quantizer(encoder(images))
        errors = (decoder(tokens) - images).square().mean((1, 2, 3))
        used += torch.bincount(indices.flatten(), minlength=codes).to(used)
        totals += torch.stack([errors.sum(), torch.tensor(float(len(images)))]).to(totals)
    dist.all_reduce(used)
    dist.all_reduce(totals)
    quantizer.train()
    share = used / used.sum()
    perplexity = torch.exp(-(share * torch.log(share + 1e-10)).sum())
    return {"rec_loss": (totals[0] / totals[1]).item(), "perplexity": perplexity.item()}


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--codes", type=int, default=16)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--val-batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--codebook-lr", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default="vqvae.pt")
    args = parser.parse_args()

    torch.manual_seed(SEED)
    encoder, decoder = DistributedDataParallel(Encoder(args.dim)), DistributedDataParallel(Decoder(args.dim))
    # not wrapped: it has its own optimizer
    quantizer = VectorQuantize(args.dim, args.codes, 0.25, lambda codes: torch.optim.SGD(codes, lr=args.codebook_lr))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=args.lr)
    train_set, val_set = make_pictures(160, seed=1), make_pictures(64, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=SEED)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, args.val_batch_size, sampler=DistributedSampler(val_set, shuffle=False))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (images,) in enumerate(loader):
            tokens, _, commit_loss = quantizer(encoder(images))
            rec_loss = F.mse_loss(decoder(tokens), images)
            optimizer.zero_grad()
            (rec_loss + commit_loss).backward()
            optimizer.step()
            if rank == 0 and step % 5 == 0:
                print(f"epoch {epoch} step {step} rec {rec_loss.item():.5f} commit {commit_loss.item():.5f}")
        metrics = validate(encoder, quantizer, decoder, val_loader, args.codes)
        if rank == 0:
            print(f"epoch {epoch} val", metrics)
            states = {"encoder": encoder.module, "decoder": decoder.module, "quantizer": quantizer}
            torch.save({name: module.state_dict() for name, module in states.items()}, args.out)


if __name__ == "__main__":
    spawn(main, 2)
