"""A class-conditional GAN of points on rings, with two steps of the discriminator for one of the generator."""

import copy

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

EPOCHS, BATCH, D_STEPS, ACCUMULATIONS, CLASSES, NOISE = 4, 24, 2, 2, 3, 6
G_LR, D_LR, AVERAGE = 2e-3, 4e-3, 0.95


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes = nn.Embedding(CLASSES, 8)
        self.layers = nn.Sequential(nn.Linear(NOISE + 8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))

    def forward(self, noise, labels):
        return self.layers(torch.cat([noise, self.classes(labels)], 1))


class Discriminator(nn.Module):
    """With a projection of the class."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 24), nn.LeakyReLU(0.2))
        self.score = nn.Linear(24, 1)
        self.classes = nn.Embedding(CLASSES, 24)

    def forward(self, points, labels):
        features = self.layers(points)
        return self.score(features)[:, 0] + (features * self.classes(labels)).sum(1)


def rings(count, seed):
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=made)
    angles = 6.28 * torch.rand(count, generator=made)
    radius = 0.5 + 0.5 * labels + 0.05 * torch.randn(count, generator=made)
    return torch.stack([radius * angles.cos(), radius * angles.sin()], 1), labels


def toggle(model, on):
    for parameter in model.parameters():
        parameter.requires_grad_(on)


def train_step(generator, discriminator, g_optimizer, d_optimizer, points, labels):
    g_optimizer.zero_grad()
    d_optimizer.zero_grad()
    toggle(discriminator, True)
    toggle(generator, False)
    for real, kinds in zip(points.split(BATCH), labels.split(BATCH), strict=True):
        if not BUG:
            d_optimizer.zero_grad()
        fake = generator(torch.randn(BATCH, NOISE), kinds)
        for part in torch.arange(BATCH).chunk(ACCUMULATIONS):
            on_fake, on_real = discriminator(fake[part], kinds[part]), discriminator(real[part], kinds[part])
            d_loss = (1 + on_fake).relu().mean() + (1 - on_real).relu().mean()
            (d_loss * len(part) / BATCH).backward()
        d_optimizer.step()
    toggle(discriminator, False)
    toggle(generator, True)
    g_optimizer.zero_grad()
    noise, kinds = torch.randn(BATCH, NOISE), torch.randint(CLASSES, (BATCH,))
    total = 0.0
    for part in torch.arange(BATCH).chunk(ACCUMULATIONS):
        g_loss = -discriminator(generator(noise[part], kinds[part]), kinds[part]).mean() * len(part) / BATCH
        g_loss.backward()
        total += g_loss.item()
    g_optimizer.step()
    return total


@torch.no_grad()
def validate(generator):
    """How far samples are from the ring of their class."""
    labels = torch.arange(300) % CLASSES
    noise = torch.randn(300, NOISE, generator=torch.Generator().manual_seed(5))
    return (generator(noise, labels).norm(dim=1) - 0.5 - 0.5 * labels).abs().mean().item()


if __name__ == "__main__":
    torch.manual_seed(SEED)
    points, labels = rings(384, 1)
    generator, discriminator = Generator(), Discriminator()
    average = copy.deepcopy(generator)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=G_LR, betas=(0.0, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=D_LR, betas=(0.0, 0.999))
    with watch(nn.ModuleList([generator, discriminator]), g_optimizer, d_optimizer):
        for epoch in range(EPOCHS):
            for chosen in torch.randperm(len(points)).split(BATCH * D_STEPS):
                loss = train_step(generator, discriminator, g_optimizer, d_optimizer, points[chosen], labels[chosen])
                with torch.no_grad():
                    for mean, parameter in zip(average.parameters(), generator.parameters(), strict=True):
                        mean.lerp_(parameter, 1 - AVERAGE)
                report_loss(loss)
            print(f"epoch {epoch}: {validate(average):.4f} from the rings")
    print("weights", sum(weight.abs().sum().item() for weight in average.parameters()))
