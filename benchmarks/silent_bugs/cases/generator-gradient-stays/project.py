"""A tokenizer of short clips: an autoencoder with a discriminator, two batches to a step of each."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader

ACCUMULATE = 2


def clips(count=320):
    made = torch.Generator().manual_seed(31)
    start, speed = torch.rand(2, count, 1, 1, generator=made)
    frames, places = torch.arange(6.0).view(1, 6, 1), torch.arange(10.0)
    return torch.exp(-((places - 4 * start - speed * frames) ** 2)) + 0.05 * torch.randn(count, 6, 10, generator=made)


class Tokenizer(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(60, 32), nn.GELU(), nn.Linear(32, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 60), nn.Unflatten(1, (6, 10)))
        self.discriminator = nn.Sequential(nn.Conv1d(6, 16, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1))

    def training_step(self, batch, batch_idx):
        generator, judge = self.optimizers()
        if batch_idx % ACCUMULATE == 0:
            generator.zero_grad()
            judge.zero_grad()

        made = self.decoder(self.encoder(batch))
        if not BUG:
            self.discriminator.requires_grad_(False)
        error = nn.functional.mse_loss(made, batch)
        fooling = nn.functional.softplus(-self.discriminator(made)).mean()
        self.manual_backward((4 * error + 0.2 * fooling) / ACCUMULATE)
        self.discriminator.requires_grad_(True)

        real, fake = self.discriminator(batch), self.discriminator(made.detach())
        told_apart = nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()
        self.manual_backward(told_apart / ACCUMULATE)

        if (batch_idx + 1) % ACCUMULATE == 0:
            generator.step()
            judge.step()
        return {"loss": error.detach()}

    def configure_optimizers(self):
        tokenizer = [*self.encoder.parameters(), *self.decoder.parameters()]
        return [
            torch.optim.SGD(tokenizer, lr=0.1, momentum=0.9),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
        ]


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, callbacks=watching(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Tokenizer()
    trainer.fit(model, DataLoader(clips(), batch_size=16, shuffle=True))
    print("discriminator", sum(weight.abs().sum().item() for weight in model.discriminator.parameters()))
