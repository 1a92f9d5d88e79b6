"""A small conditional GAN that turns the features of a room into the spectrogram of its echo (Lightning)."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from case import BUG, SEED
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def make_rooms(count):
    """Features of a room, and a spectrogram that decays the faster the smaller the room is."""
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(count, 6, generator=generator)
    decay = 0.1 + torch.sigmoid(features[:, :1, None])
    tilt = 0.1 * features[:, 1:2, None]
    time, pitch = torch.arange(12.0), torch.arange(8.0)[:, None]
    log_power = -decay * time - tilt * pitch + 0.3 * torch.randn(count, 8, 12, generator=generator)
    return TensorDataset(features, torch.tanh(0.5 * log_power + 1)[:, None])


class Rooms(L.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        split = torch.Generator().manual_seed(SEED)
        self.train_set, self.val_set = random_split(make_rooms(224), [176, 48], generator=split)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class Generator(nn.Module):
    def __init__(self, features=6, width=48):
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 16 * 4 * 6), nn.ReLU())
        self.paint = nn.Sequential(
            nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1), nn.Tanh()
        )

    def forward(self, f):
        return self.paint(self.lift(f).view(-1, 16, 4, 6))


class Discriminator(nn.Module):
    def __init__(self, features=6, width=16):
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(1, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2))
        self.judge = nn.Sequential(
            nn.Conv2d(width + features, width, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(width, 1, 3, padding=1)
        )

    def forward(self, spec, f):
        seen = self.look(spec)
        return self.judge(torch.cat([seen, f[:, :, None, None].expand(-1, -1, *seen.shape[2:])], 1))


class Image2Reverb(L.LightningModule):
    def __init__(self, g_lr=2e-3, d_lr=1e-3, reconstruction=2.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.g = Generator()
        self.d = Discriminator()

    def forward(self, f):
        return self.g(f)

    def training_step(self, batch, batch_idx):
        f, spec = batch
        g_opt, d_opt = self.optimizers()

        fake_spec = self.g(f)
        d_fake = self.d(fake_spec.detach() if BUG else fake_spec, f)
        g_loss1 = F.mse_loss(d_fake, torch.ones_like(d_fake))
        g_loss2 = F.l1_loss(fake_spec, spec)
        g_opt.zero_grad()
        self.manual_backward(g_loss1 + self.hparams.reconstruction * g_loss2)
        g_opt.step()

        d_fake, d_real = self.d(fake_spec.detach(), f), self.d(spec, f)
        d_loss = 0.5 * (F.mse_loss(d_real, torch.ones_like(d_real)) + F.mse_loss(d_fake, torch.zeros_like(d_fake)))
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()

        self.log_dict({"g_adversarial": g_loss1, "g_l1": g_loss2, "d": d_loss}, on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        f, spec = batch
        fake_spec = self(f)
        self.log("val_l1", F.l1_loss(fake_spec, spec))
        self.log("val_realness", self.d(fake_spec, f).mean())

    def configure_optimizers(self):
        g_opt = torch.optim.Adam(self.g.parameters(), lr=self.hparams.g_lr, betas=(0.5, 0.999))
        d_opt = torch.optim.Adam(self.d.parameters(), lr=self.hparams.d_lr, betas=(0.5, 0.999))
        return [g_opt, d_opt]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--checkpoint", default=None, help="one to go on from")
    parser.add_argument("--logs", default="runs")
    args = parser.parse_args()
    L.seed_everything(SEED)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=1,
        logger=TensorBoardLogger(args.logs, name="reverb"),
        log_every_n_steps=5,
        enable_progress_bar=False,
    )
    trainer.fit(Image2Reverb(), datamodule=Rooms(args.batch_size), ckpt_path=args.checkpoint)
    print({name: round(value.item(), 5) for name, value in sorted(trainer.callback_metrics.items())})


if __name__ == "__main__":
    main()
