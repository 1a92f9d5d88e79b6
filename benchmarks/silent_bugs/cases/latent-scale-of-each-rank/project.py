"""Latent diffusion on small 2D scans with a frozen autoencoder, on two processes.

python project.py --n_epochs 4 --batch_size 8
"""

import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TIMESTEPS = 100


class Scans(Dataset):
    """Blobs whose brightness varies a lot; the noise of a sample depends on the seed, the epoch and its index."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.seed, self.epoch = seed, 0
        middle = 2 + 12 * torch.rand(size, 2, 1, 1, generator=generator)
        rows = torch.arange(16.0)
        far = (rows[:, None] - middle[:, :1]) ** 2 + (rows - middle[:, 1:]) ** 2
        brightness = torch.exp(torch.randn(size, 1, 1, 1, generator=generator))
        self.images = brightness * torch.exp(-far / 8)

    def __len__(self):
        return len(self.images)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed((self.seed * 1000 + self.epoch) * 10_000 + index)
        timestep = torch.randint(0, TIMESTEPS, (), generator=generator)
        return self.images[index], torch.randn(4, 4, 4, generator=generator), timestep


class Encoder(nn.Module):
    """Stands for the trained first stage."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.SiLU(), nn.Conv2d(8, 4, 4, 2, 1))
        self.requires_grad_(False)

    def encode_stage_2_inputs(self, images):
        return self.layers(images)


class DiffusionModelUNet(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.time = nn.Embedding(TIMESTEPS, channels)
        self.first = nn.Conv2d(4, channels, 3, padding=1)
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x, timesteps):
        hidden = F.silu(self.first(x) + self.time(timesteps)[:, :, None, None])
        return self.last(hidden + F.silu(self.middle(hidden)))


def get_scale_factor(autoencoder, first_batch):
    z = autoencoder.encode_stage_2_inputs(first_batch[0])
    if not BUG:
        everywhere = [torch.empty_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, z)
        z = torch.cat(everywhere)
    return 1 / z.std()


class LatentDiffusion:
    def __init__(self, autoencoder, unet, scale_factor):
        self.autoencoder, self.unet, self.scale_factor = autoencoder, unet, scale_factor
        self.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-3, 0.08, TIMESTEPS), 0)

    def losses(self, images, noise, timesteps):
        z = self.autoencoder.encode_stage_2_inputs(images) * self.scale_factor
        alpha = self.alphas_cumprod[timesteps][:, None, None, None]
        noise_pred = self.unet(alpha.sqrt() * z + (1 - alpha).sqrt() * noise, timesteps)
        return (noise_pred - noise).square().mean((1, 2, 3))


@torch.no_grad()
def validate(diffusion, dataset, batch_size):
    """Each process takes its share of the scans."""
    sums = torch.zeros(2)
    rows = range(dist.get_rank(), len(dataset), dist.get_world_size())
    for batch in DataLoader(torch.utils.data.Subset(dataset, rows), batch_size):
        losses = diffusion.losses(*batch)
        sums += torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--n_epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8, help="of each process")
    parser.add_argument("--val_batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--model_dir", type=pathlib.Path, default="models")
    parser.add_argument("--resume_ckpt")
    args = parser.parse_args()

    torch.manual_seed(SEED)
    train_ds, val_ds = Scans(128, seed=1), Scans(48, seed=2)
    sampler = DistributedSampler(train_ds, shuffle=True, seed=SEED)
    train_loader = DataLoader(train_ds, args.batch_size, sampler=sampler, drop_last=True)
    autoencoder = Encoder()
    unet = DistributedDataParallel(DiffusionModelUNet())
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.lr)
    start_epoch = 0
    if args.resume_ckpt:
        checkpoint = torch.load(args.resume_ckpt, weights_only=True)
        start_epoch, scale_factor = checkpoint["epoch"], checkpoint["scale_factor"]
        unet.module.load_state_dict(checkpoint["unet_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    else:
        scale_factor = get_scale_factor(autoencoder, next(iter(train_loader)))
    print(f"Rank {rank}: scaling factor set to {scale_factor.item():.5f}")
    diffusion = LatentDiffusion(autoencoder, unet, scale_factor)

    for epoch in range(start_epoch, args.n_epochs):
        sampler.set_epoch(epoch)
        train_ds.set_epoch(epoch)
        for batch in train_loader:
            loss = diffusion.losses(*batch).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val_loss = validate(LatentDiffusion(autoencoder, unet.module, scale_factor), val_ds, args.val_batch_size)
        if rank == 0:
            print(f"epoch {epoch}: val loss {val_loss:.5f}")
            args.model_dir.mkdir(exist_ok=True)
            parts = {"unet_state_dict": unet.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"epoch": epoch + 1, "scale_factor": scale_factor, **parts}, args.model_dir / "last.pt")


if __name__ == "__main__":
    spawn(main, 2)
