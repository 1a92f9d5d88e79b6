"""A GAN with a gradient penalty: two optimizers, two critic steps for each generator step, a step-wise checkpoint."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

STEPS, LATENT = 30, 4
torch.manual_seed(0)
angles = torch.rand(128) * 6.28
ring = torch.stack([angles.cos(), angles.sin()], 1)
generator = nn.Sequential(nn.Linear(LATENT, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
of_generator = torch.optim.Adam(generator.parameters(), 1e-3, (0.0, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), 1e-3, (0.0, 0.9))
parts = {"generator": generator, "critic": critic, "of_generator": of_generator, "of_critic": of_critic}


def penalty(real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * made).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def data(step: int):
    """Batches from critic step `step` on: 8 of an epoch, whose order is drawn by its number."""
    for epoch in itertools.count(step // 8):
        order = torch.Generator().manual_seed(epoch)
        loader = DataLoader(TensorDataset(ring), 16, shuffle=True, generator=order)
        yield from itertools.islice(loader, step % 8 if epoch == step // 8 else 0, None)


step = 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    step = saved["step"]
batches = data(2 * step)
if path:
    torch.set_rng_state(saved["random"])
while step < STEPS:
    for _ in range(2):
        (real,) = next(batches)
        made = generator(torch.randn(len(real), LATENT)).detach()
        loss = critic(made).mean() - critic(real).mean() + 5 * penalty(real, made)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
    of_generator.zero_grad()
    (-critic(generator(torch.randn(16, LATENT))).mean()).backward()
    of_generator.step()
    step += 1
    if path := relations.save():
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save(states | {"step": step, "random": torch.get_rng_state()}, path)
