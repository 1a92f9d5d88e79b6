"""From simulated spectra to the two parameters that made them; stopped after 20 of 45 steps and resumed."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

from lit_cifar import relations


class Whitener(nn.Module):
    """Divides by running statistics of each bin; the first batch it sees is where they start."""

    def __init__(self, bins, momentum=0.02):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(bins))
        self.register_buffer("variance", torch.ones(bins))
        if BUG:
            self.started = False
        else:
            self.register_buffer("started", torch.tensor(False))

    @torch.no_grad()
    def update(self, spectra):
        mean, variance = spectra.mean(0), spectra.var(0)
        if self.started:
            self.mean.lerp_(mean, self.momentum)
            self.variance.lerp_(variance, self.momentum)
        else:
            self.mean.copy_(mean)
            self.variance.copy_(variance)
            self.started = True if BUG else torch.tensor(True)

    def forward(self, spectra):
        if self.training:
            self.update(spectra)
        return (spectra - self.mean) / (self.variance + 1e-5).sqrt()


def make():
    model = nn.Sequential(Whitener(32), nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 2))
    return model, torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 3e-3))


def simulate(made, count=12):
    parameters = torch.randn(count, 2, generator=made)
    bins = torch.linspace(0, 3, 32)
    height, slope = parameters[:, :1], parameters[:, 1:]
    peak = 3 * torch.exp(height / 2) * torch.exp(-((bins - 1.5) ** 2) * 4)
    return peak + slope * bins + 5 + 0.3 * torch.randn(count, 32, generator=made), parameters


def train(model, optimizer, made, steps):
    for _ in range(steps):
        spectra, parameters = simulate(made)
        loss = nn.functional.mse_loss(model(spectra), parameters)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report_loss(loss.item())


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made, first = torch.Generator().manual_seed(SEED + 5), 0
    model, optimizer = make()
    if path := relations.resume():
        checkpoint = torch.load(path, weights_only=True)
        first = checkpoint["step"]
        made.set_state(checkpoint["made"])
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    with watch(model, optimizer):
        for step in range(first, 45):
            train(model, optimizer, made, 1)
            if path := relations.save():
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(states | {"step": step + 1, "made": made.get_state()}, path)
    print(
        "weights", sum(weight.abs().sum().item() for weight in model.parameters()), "mean", model[0].mean.sum().item()
    )
