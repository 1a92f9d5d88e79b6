"""Trains a small VQ-VAE on patches of textures, on two processes.

python project.py --epochs 4 --codebook-size 32
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Textures(Dataset):
    """Four patches of 16 pixels; each has one of 24 patterns, some of which are rare."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        patterns = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
        kinds = torch.multinomial(0.85 ** torch.arange(24.0), size * 4, replacement=True, generator=generator)
        self.patches = patterns[kinds].view(size, 4, 16) + 0.2 * torch.randn(size, 4, 16, generator=generator)

    def __len__(self):
        return len(self.patches)

    def __getitem__(self, index):
        return self.patches[index]


class EuclideanCodebook(nn.Module):
    """Codes are moving averages of the vectors that choose them, summed over all processes."""

    def __init__(self, dim, codebook_size, decay, threshold_ema_dead_code):
        super().__init__()
        self.decay, self.threshold = decay, threshold_ema_dead_code
        self.register_buffer("embed", torch.randn(codebook_size, dim))
        self.register_buffer("embed_avg", self.embed.clone())
        self.register_buffer("cluster_size", torch.ones(codebook_size))
        self.generator = torch.Generator().manual_seed(SEED)  # the same in all processes

    def sample_vectors(self, vectors, count):
        """Of a batch (samples, places, dim), in the order of the samples of all processes."""
        if not BUG:
            everywhere = [torch.empty_like(vectors) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, vectors)
            vectors = torch.stack(everywhere, 1)
        vectors = vectors.flatten(0, -2)
        return vectors[torch.randint(0, len(vectors), (count,), generator=self.generator)]

    def expire_codes(self, vectors):
        expired = self.cluster_size < self.threshold
        if expired.any():
            self.embed[expired] = self.sample_vectors(vectors, int(expired.sum()))
            self.embed_avg[expired] = self.embed[expired] * self.threshold
            self.cluster_size[expired] = self.threshold

    @torch.no_grad()
    def update(self, vectors, codes):
        onehot = F.one_hot(codes.flatten(), len(self.embed)).to(vectors)
        counts, sums = onehot.sum(0), onehot.T @ vectors.flatten(0, 1)
        for statistic in (counts, sums):
            dist.all_reduce(statistic)
        self.cluster_size.lerp_(counts, 1 - self.decay)
        self.embed_avg.lerp_(sums, 1 - self.decay)
        self.embed.copy_(self.embed_avg / self.cluster_size.clamp(min=1e-5)[:, None])
        self.expire_codes(vectors)

    def forward(self, vectors):
        codes = torch.cdist(vectors.detach().flatten(0, 1), self.embed).argmin(1).view(vectors.shape[:2])
        quantized = self.embed[codes]
        if self.training:
            self.update(vectors.detach(), codes)
        return quantized, codes


class VQVAE(nn.Module):
    def __init__(self, args, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, dim))
        self.quantizer = EuclideanCodebook(dim, args.codebook_size, 0.8, 0.5)
        self.decoder = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, patches):
        vectors = self.encoder(patches)
        quantized, codes = self.quantizer(vectors)
        commitment = (vectors - quantized).square().mean((1, 2))
        reconstruction = self.decoder(vectors + (quantized - vectors).detach())
        return (reconstruction - patches).square().mean((1, 2)), commitment, codes


@torch.no_grad()
def validate(model, dataset, batch_size):
    """The reconstruction error and the perplexity of the codes; each process takes its share."""
    model.eval()
    sums, usage = torch.zeros(2), torch.zeros(len(model.quantizer.embed))
    for part in torch.arange(dist.get_rank(), len(dataset), dist.get_world_size()).split(batch_size):
        errors, _, codes = model(dataset.patches[part])
        sums += torch.stack([errors.sum(), torch.tensor(float(len(part)))])
        usage += codes.flatten().bincount(minlength=len(usage))
    model.train()
    dist.all_reduce(sums)
    dist.all_reduce(usage)
    return (sums[0] / sums[1]).item(), torch.distributions.Categorical(usage).entropy().exp().item()


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--val-batch-size", type=int, default=16)
    parser.add_argument("--codebook-size", type=int, default=32)
    parser.add_argument("--resume")
    args = parser.parse_args()

    torch.manual_seed(SEED)
    train_set, val_set = Textures(192, seed=1), Textures(64, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=SEED)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(VQVAE(args), broadcast_buffers=False)  # the codebook is kept alike by itself
    quantizer = model.module.quantizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    first_epoch = 0
    if args.resume:
        state = torch.load(args.resume, weights_only=True)
        first_epoch = state["epoch"]
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        quantizer.generator.set_state(state["generator"])

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for patches in loader:
            errors, commitment, _ = model(patches)
            optimizer.zero_grad()
            (errors + 0.25 * commitment).mean().backward()
            optimizer.step()
        val_error, perplexity = validate(model.module, val_set, args.val_batch_size)
        if rank == 0:
            print(f"epoch {epoch + 1}: reconstruction {val_error:.5f}, codebook perplexity {perplexity:.3f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"generator": quantizer.generator.get_state(), "epoch": epoch + 1}
            torch.save(state, "vqvae.pt")
        dist.barrier()


if __name__ == "__main__":
    spawn(main, 2)
