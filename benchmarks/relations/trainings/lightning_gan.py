"""A GAN with two optimizers: manual optimization, noise drawn in the step."""

from itertools import pairwise

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def layers(*widths: int) -> nn.Sequential:
    parts = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*parts[:-1])


class GAN(L.LightningModule):
    def __init__(self, latent: int = 4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator, self.critic = layers(latent, 32, 2), layers(2, 32, 1)
        self.register_buffer("fixed_noise", torch.randn(64, latent))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        of_generator, of_critic = self.optimizers()
        noise = torch.randn(len(real), self.latent, device=self.device)

        self.toggle_optimizer(of_critic)
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(self.generator(noise).detach())).mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        self.untoggle_optimizer(of_critic)

        self.toggle_optimizer(of_generator)
        loss = F.softplus(-self.critic(self.generator(noise))).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log("generator_loss", loss)

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():
            schedule.step()

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        self.log("val_real", F.softplus(-self.critic(real)).mean(), batch_size=len(real))
        self.log("val_spread", self.generator(self.fixed_noise).std(), batch_size=len(real))

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(part.parameters(), 2e-3, (0.5, 0.9)) for part in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(one, 0.95) for one in optimizers]


if __name__ == "__main__":
    L.seed_everything(3)
    angles = torch.rand(160) * 6.28
    ring = torch.stack([angles.cos(), angles.sin()], 1)
    loader = DataLoader(TensorDataset(ring[:128]), batch_size=16, shuffle=True, drop_last=True)
    L.Trainer(max_epochs=4).fit(GAN(), loader, DataLoader(TensorDataset(ring[128:]), batch_size=10))
