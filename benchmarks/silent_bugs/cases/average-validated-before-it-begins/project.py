"""A forecaster of hourly load for six meters; the weights are averaged once the first epochs are over."""

import argparse

import lightning as L
import torch
from case import BUG, SEED
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset


class LateEMA(EMAWeightAveraging):
    """The average is the model itself until its first update."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._average_model.n_averaged == 0:
            self._average_model.module.load_state_dict(pl_module.state_dict())


class Windows(Dataset):
    def __init__(self, series, context, horizon, stride):
        self.series, self.context, self.horizon = series, context, horizon
        last = series.shape[1] - context - horizon
        self.starts = [(m, t) for m in range(len(series)) for t in range(0, last + 1, stride)]

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        meter, start = self.starts[index]
        middle = start + self.context
        return self.series[meter, start:middle], self.series[meter, middle : middle + self.horizon]


class LoadData(L.LightningDataModule):
    def __init__(self, context=24, horizon=6, batch_size=32):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        made = torch.Generator().manual_seed(11)
        hours = torch.arange(24 * 18)
        phase = torch.rand(6, 1, generator=made) * 24
        level = 1 + torch.rand(6, 1, generator=made)
        day = (2 * torch.pi * (hours + phase) / 24).sin() + 0.4 * (4 * torch.pi * hours / 24).cos()
        load = level * day + 0.15 * torch.randn(6, len(hours), generator=made)
        cut = 24 * 14
        past = load[:, :cut]
        load = (load - past.mean(1, keepdim=True)) / past.std(1, keepdim=True)
        sizes = self.hparams.context, self.hparams.horizon
        self.train = Windows(load[:, :cut], *sizes, stride=3)
        self.val = Windows(load[:, cut - self.hparams.context :], *sizes, stride=6)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)


class Forecaster(L.LightningModule):
    def __init__(self, context=24, horizon=6, hidden=32, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.GRU(1, hidden, batch_first=True)
        self.shortcut = nn.Linear(context, horizon)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Dropout(0.1), nn.Linear(hidden, horizon))

    def forward(self, past):
        _, last = self.encoder(past.unsqueeze(2))
        return self.shortcut(past) + self.head(last[0])

    def training_step(self, batch, batch_idx):
        past, future = batch
        loss = nn.functional.smooth_l1_loss(self(past), future)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        past, future = batch
        forecast = self(past)
        self.log("val_loss", nn.functional.smooth_l1_loss(forecast, future), batch_size=len(past))
        self.log("val_mae", (forecast - future).abs().mean(), batch_size=len(past), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--ema-decay", type=float, default=0.9)
    parser.add_argument("--ema-start", type=int, default=50, help="optimizer step from which weights are averaged")
    parser.add_argument("--out", default="runs")
    args = parser.parse_args()

    L.seed_everything(SEED)
    averaging = EMAWeightAveraging if BUG else LateEMA
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        callbacks=[
            averaging(decay=args.ema_decay, update_starting_at_step=args.ema_start, use_buffers=True),
            ModelCheckpoint(dirpath=f"{args.out}/checkpoints", monitor="val_loss", filename="{epoch}-{val_loss:.4f}"),
        ],
        logger=CSVLogger(args.out),
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = LoadData(batch_size=args.batch_size)
    trainer.fit(Forecaster(), datamodule=data)
    print("last:", {name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()})
    print("best:", trainer.checkpoint_callback.best_model_path)


if __name__ == "__main__":
    main()
