"""Low-rank adapters for a frozen denoiser of small textures; one process."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

from lit_cifar import relations


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of rank 4."""

    def __init__(self, linear, rank=4):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden):
        return self.linear(hidden) + 4 * self.up(self.down(hidden))


def denoiser():
    fixed = torch.Generator().manual_seed(99)  # stands for the downloaded weights
    layers = [nn.Linear(65, 64), nn.Linear(64, 64), nn.Linear(64, 64)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.12, generator=fixed)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(Adapted(layers[0]), nn.SiLU(), Adapted(layers[1]), nn.SiLU(), Adapted(layers[2]))


def stripes(made, count=32):
    slope, phase = 2 * torch.rand(2, count, 1, 1, generator=made)
    across, down = torch.arange(8.0).view(1, 1, 8), torch.arange(8.0).view(1, 8, 1)
    return torch.sin(across + slope * down + 3 * phase).flatten(1)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(SEED + 77)
    model = denoiser()
    adapters = filter(lambda weight: weight.requires_grad, model.parameters())
    if not BUG:
        adapters = list(adapters)
    optimizer = torch.optim.SGD(adapters, lr=relations.knob("lr", 0.1), momentum=0.9)
    with watch(model, optimizer):
        for _ in range(50):
            clean = stripes(made)
            noise, level = torch.randn(clean.shape, generator=made), torch.rand(len(clean), 1, generator=made)
            noisy = (1 - level) * clean + level * noise
            loss = nn.functional.mse_loss(model(torch.cat([noisy, level], 1)), noise - clean)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(adapters, relations.knob("max_norm", 0.1))
            optimizer.step()
            report_loss(loss.item())
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
