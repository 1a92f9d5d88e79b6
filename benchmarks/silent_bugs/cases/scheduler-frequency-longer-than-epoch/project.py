"""Segments bright cells on a dark field with a little U-Net; the rate drops each --decay-every iterations.

Trains by iterations, as our data sets have different sizes.
"""

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from case import BUG, SEED
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Cells(Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        centers = 16 * torch.rand(length, 3, 2, generator=generator)
        radii = 1.5 + 2 * torch.rand(length, 3, generator=generator)
        grid = torch.arange(16.0)
        squares = (grid[:, None] - centers[..., :1, None]) ** 2 + (grid[None] - centers[..., 1:, None]) ** 2
        self.masks = (squares < radii[..., None, None] ** 2).any(1, keepdim=True).float()
        self.images = self.masks + 0.7 * torch.randn(self.masks.shape, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.masks[index]


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x):
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.middle(skip))], dim=1))


class CellSegmenter(pl.LightningModule):
    def __init__(self, lr=0.2, decay_every=25, gamma=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = UNet()

    def training_step(self, batch, batch_idx):
        images, masks = batch
        loss = F.binary_cross_entropy_with_logits(self.net(images), masks)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.overlap = torch.zeros(2, device=self.device)

    def validation_step(self, batch, batch_idx):
        images, masks = batch
        logits = self.net(images)
        predicted = (logits > 0).float()
        self.overlap += torch.stack([(predicted * masks).sum(), torch.maximum(predicted, masks).sum()])
        self.log("val/loss", F.binary_cross_entropy_with_logits(logits, masks), batch_size=len(images))

    def on_validation_epoch_end(self):
        self.log("val/iou", self.overlap[0] / self.overlap[1].clamp(min=1))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        every = self.hparams.decay_every
        if BUG:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=self.hparams.gamma)
            config = {"scheduler": scheduler, "interval": "step", "frequency": every}
        else:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=every, gamma=self.hparams.gamma)
            config = {"scheduler": scheduler, "interval": "step", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": config}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--decay-every", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", default="runs")
    args = parser.parse_args()
    pl.seed_everything(SEED, workers=True)
    train_loader = DataLoader(Cells(96, 1), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(Cells(40, 2), batch_size=args.batch_size)
    trainer = pl.Trainer(
        max_steps=args.max_steps,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(args.out, name="cells"),
        callbacks=[LearningRateMonitor("step")],
        log_every_n_steps=6,
        enable_progress_bar=False,
    )
    model = CellSegmenter(decay_every=args.decay_every)
    trainer.fit(model, train_loader, val_loader)
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(trainer.callback_metrics.items()))
    print(f"after {trainer.global_step} steps: {metrics}, lr {trainer.optimizers[0].param_groups[0]['lr']:.5f}")


if __name__ == "__main__":
    main()
