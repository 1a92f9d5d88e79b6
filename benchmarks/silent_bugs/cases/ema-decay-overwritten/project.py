"""A diffusion model of points on two moons that samples, and is evaluated, with an average of its weights."""

import math
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

STEPS, BATCH_SIZE, LEVELS, EVAL_EVERY = 160, 64, 50, 40


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.level = nn.Embedding(LEVELS, width)
        self.first = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2))
        self.last = nn.Linear(width, 2)

    def forward(self, points, levels):
        hidden = self.first(points) + self.level(levels)
        for block in self.blocks:
            hidden = hidden + nn.functional.silu(block(hidden))
        return self.last(hidden)


class Average:
    """Exponential average of the weights whose decay grows with the steps up to a bound."""

    def __init__(self, model, decay=0.8):
        self.decay, self.step_count = decay, 0
        self.shadow = [weight.detach().clone() for weight in model.parameters()]

    def get_factor(self, step):
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def step(self, model):
        self.step_count += 1
        if BUG:
            self.decay = self.get_factor(self.step_count)
            factor = self.decay
        else:
            factor = self.get_factor(self.step_count)
        for shadow, weight in zip(self.shadow, model.parameters(), strict=True):
            shadow.sub_(factor * (shadow - weight))

    @contextmanager
    def in_place_of(self, model):
        kept = [weight.detach().clone() for weight in model.parameters()]
        with torch.no_grad():
            for weight, shadow in zip(model.parameters(), self.shadow, strict=True):
                weight.copy_(shadow)
            yield
            for weight, own in zip(model.parameters(), kept, strict=True):
                weight.copy_(own)

    def state_dict(self):
        return {"decay": self.decay, "step_count": self.step_count, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.decay, self.step_count = state["decay"], state["step_count"]
        self.shadow = [shadow.clone() for shadow in state["shadow"]]


def moons(count, made):
    angles = math.pi * torch.rand(count, generator=made)
    upper = torch.rand(count, generator=made) < 0.5
    sign = torch.where(upper, 1.0, -1.0)
    points = torch.stack(
        [torch.where(upper, angles.cos(), 1 - angles.cos()), sign * angles.sin() + 0.25 * (1 - sign)], 1
    )
    return points + 0.05 * torch.randn(count, 2, generator=made)


def denoising_loss(model, points, made):
    levels = torch.randint(0, LEVELS, (len(points),), generator=made)
    noise = torch.randn(points.shape, generator=made)
    kept = torch.cos(0.5 * math.pi * (levels + 1) / (LEVELS + 1)).square().unsqueeze(1)
    return nn.functional.mse_loss(model(kept.sqrt() * points + (1 - kept).sqrt() * noise, levels), noise)


def evaluate(model):
    made = torch.Generator().manual_seed(987_654_321)  # the same points, levels and noise each time
    points = moons(512, made)
    model.eval()
    with torch.no_grad():
        loss = denoising_loss(model, points, made).item()
    model.train()
    return loss


def save(path, step, model, optimizer, average):
    parts = {"model": model, "optimizer": optimizer, "average": average}
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, path)


def load(path, model, optimizer, average):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    average.load_state_dict(saved["average"])
    return saved["step"]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    average = Average(model)
    start = load(sys.argv[1], model, optimizer, average) if len(sys.argv) > 1 else 0
    with watch(model, optimizer), tempfile.TemporaryDirectory() as folder:
        for step in range(start, STEPS):
            made = torch.Generator().manual_seed(100_000 * SEED + step)
            loss = denoising_loss(model, moons(BATCH_SIZE, made), made)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.step(model)
            report_loss(loss.item())
            if (step + 1) % EVAL_EVERY == 0:
                save(Path(folder) / "last.pt", step + 1, model, optimizer, average)
                own = evaluate(model)
                with average.in_place_of(model):
                    print("step", step + 1, "val_loss", own, "val_loss of the average", evaluate(model))
