"""Forecasts of many hourly series: each window is normalised by its past, and the best epoch is kept."""

import tempfile

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PAST, FUTURE = 36, 12


class Scaler:
    """Mean and spread of the past of each window, with which its future is normalised too."""

    def __init__(self, past):
        self.mean = past.mean(1, keepdim=True)
        self.spread = past.std(1, keepdim=True).clamp(min=1e-3)

    def normalise(self, values):
        return (values - self.mean) / self.spread

    def restore(self, values):
        return self.mean + self.spread * values


class Block(nn.Module):
    """Explains a part of the past and forecasts with it."""

    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PAST, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, PAST + FUTURE)

    def forward(self, past):
        return self.head(self.layers(past)).split([PAST, FUTURE], 1)


class Forecaster(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, past):
        forecast = 0
        for block in self.blocks:
            explained, part = block(past)
            past, forecast = past - explained, forecast + part
        return forecast

    def training_step(self, batch, batch_idx):
        past, future = batch
        scaler = Scaler(past)
        loss = nn.functional.l1_loss(self(scaler.normalise(past)), scaler.normalise(future))
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(past))
        return loss

    def validation_step(self, batch, batch_idx):
        past, future = batch
        scaler = Scaler(past)
        forecast = self(scaler.normalise(past))
        if not BUG:
            forecast = scaler.restore(forecast)
        self.log("val_loss", nn.functional.l1_loss(forecast, future), batch_size=len(past))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def windows(first, last, series=16, seed=3):
    """Windows that begin between two hours, of series with a day, a trend and noise, each at a level of its own."""
    made = torch.Generator().manual_seed(seed)
    hours = torch.arange(240.0)
    level = 20 * torch.rand(series, 1, generator=made).exp()
    phase, slope = 6.3 * torch.rand(series, 1, generator=made), 0.002 * torch.randn(series, 1, generator=made)
    values = 1 + 0.4 * torch.sin(6.2832 * hours / 24 + phase) + slope * hours
    values = level * (values + 0.08 * torch.randn(series, 240, generator=made))
    cut = values[:, first:last].unfold(1, PAST + FUTURE, 9).flatten(0, 1)
    return TensorDataset(cut[:, :PAST].contiguous(), cut[:, PAST:].contiguous())


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, filename="{epoch}")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=5,
            gradient_clip_val=1.0,
            callbacks=[best, *watching()],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        train = DataLoader(windows(0, 170), batch_size=16, shuffle=True)
        trainer.fit(Forecaster(), train, DataLoader(windows(134, 240), batch_size=24))
        print({name: value.item() for name, value in trainer.callback_metrics.items()}, best.best_model_path[-12:])
