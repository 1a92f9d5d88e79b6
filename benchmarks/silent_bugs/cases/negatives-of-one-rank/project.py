"""Views of made-up spectra are matched without labels (SimCLR) on two processes, with checkpoints."""

import math
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, BATCH, TEMPERATURE = 4, 8, 0.5


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        ctx.count = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        first = dist.get_rank() * ctx.count
        return gradient[first : first + ctx.count]


def nt_xent_loss(out_1, out_2, temperature):
    if not BUG:
        out_1, out_2 = Gather.apply(out_1), Gather.apply(out_2)
    out = torch.cat([out_1, out_2])
    alike = (out @ out.T / temperature).masked_fill(torch.eye(len(out), dtype=torch.bool), -math.inf)
    other = torch.arange(len(out)).roll(len(out_1))
    return nn.functional.cross_entropy(alike, other)


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, 12, 7, stride=2), nn.GELU(), nn.Conv1d(12, 16, 5, stride=2))
        self.projection = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, spectra):
        return nn.functional.normalize(self.projection(self.encoder(spectra).mean(2)), dim=1)


def make_spectra(count, seed):
    made = torch.Generator().manual_seed(seed)
    middles, widths = torch.rand(count, 3, 1, generator=made) * 48, 1 + 3 * torch.rand(count, 3, 1, generator=made)
    return torch.exp(-(((torch.arange(48.0) - middles) / widths) ** 2)).sum(1, keepdim=True)


def augment(spectra, made):
    scale = 0.8 + 0.4 * torch.rand(len(spectra), 1, 1, generator=made)
    return scale * spectra + 0.1 * torch.randn(spectra.shape, generator=made)


@torch.no_grad()
def matched(model, spectra):
    made = torch.Generator().manual_seed(9)
    first, second = model(augment(spectra, made)), model(augment(spectra, made))
    return ((first @ second.T).argmax(1) == torch.arange(len(spectra))).float().mean().item()


def train(path, rank):
    torch.manual_seed(SEED)
    spectra, held_out = make_spectra(96, 71), make_spectra(24, 72)
    sampler = DistributedSampler(spectra, seed=SEED)
    loader = DataLoader(spectra, batch_size=BATCH, sampler=sampler)
    net = SimCLR()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    parts, first = {"net": net, "optimizer": optimizer, "schedule": schedule}, 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        first = saved["epoch"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    model = DistributedDataParallel(net)
    with watch(model, optimizer):
        for epoch in range(first, EPOCHS):
            sampler.set_epoch(epoch)
            made = torch.Generator().manual_seed(1000 * SEED + 10 * epoch + rank)
            for rows in loader:
                first_views, second_views = augment(rows, made), augment(rows, made)
                out_1, out_2 = model(torch.cat([first_views, second_views])).chunk(2)
                loss = nt_xent_loss(out_1, out_2, TEMPERATURE)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            schedule.step()
            if rank == 0:
                print(f"epoch {epoch}: matched {matched(net, held_out):.3f}")
                torch.save({"epoch": epoch + 1, **{name: part.state_dict() for name, part in parts.items()}}, path)
            dist.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(partial(train, Path(folder) / "last.ckpt"), 2)
