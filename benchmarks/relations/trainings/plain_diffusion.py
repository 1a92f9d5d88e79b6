"""A diffusion model: noise and noise levels drawn in the step; a hand-written average of the weights."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

LEVELS, EPOCHS, DECAY = 20, 4, relations.knob("decay", 0.95)
KEPT = torch.linspace(0.99, 0.05, LEVELS)  # of the signal's variance, by level


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, 16)
        self.inner, self.outer = nn.Linear(2 + 16, 48), nn.Linear(48, 2)

    def forward(self, noisy: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(torch.cat([noisy, self.level(level)], 1))))


def loss_of(model: nn.Module, points: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    level = torch.randint(LEVELS, (len(points),), generator=generator)
    noise = torch.randn(points.shape, generator=generator)
    kept = KEPT[level, None]
    return (model(kept.sqrt() * points + (1 - kept).sqrt() * noise, level) - noise).square().mean()


def main() -> None:
    torch.manual_seed(0)
    angles = torch.rand(144) * 6.28
    points = torch.stack([angles.cos(), angles.sin()], 1)
    loader = DataLoader(TensorDataset(points[:112]), 16, shuffle=True)
    held_out = DataLoader(TensorDataset(points[112:]), 16)
    model = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = 0
    if path := relations.resume():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        average.load_state_dict(saved["average"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        first = saved["epoch"]
    for epoch in range(first, EPOCHS):
        for (batch,) in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 1 - DECAY)
        noise = torch.Generator().manual_seed(0)  # the same each time
        with torch.no_grad():
            losses = [loss_of(average, batch, noise).item() * len(batch) for (batch,) in held_out]
        relations.report(val_loss=sum(losses) / len(held_out.dataset), average=average)
        if path := relations.save():
            states = {"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states | {"random": torch.get_rng_state(), "epoch": epoch + 1}, path)


if __name__ == "__main__":
    main()
