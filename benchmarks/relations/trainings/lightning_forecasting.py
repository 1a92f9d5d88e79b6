"""A time series: windows that overlap, a recurrent network, and a loss in the units of the data."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, series: torch.Tensor, length: int = 16, ahead: int = 4) -> None:
        self.series, self.length, self.ahead = series, length, ahead

    def __len__(self) -> int:
        return len(self.series) - self.length - self.ahead + 1

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        end = start + self.length
        return {"past": self.series[start:end, None], "future": self.series[end : end + self.ahead]}


class Forecaster(pl.LightningModule):
    def __init__(self, mean: float, spread: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("spread", torch.tensor(spread))
        self.reader, self.head = nn.GRU(1, 16, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(16, 4)

    def forward(self, past):
        read, _ = self.reader((past - self.mean) / self.spread)
        return self.head(read[:, -1]) * self.spread + self.mean

    def training_step(self, batch, batch_idx):
        return nn.functional.l1_loss(self(batch["past"]), batch["future"])

    def validation_step(self, batch, batch_idx):
        error = nn.functional.l1_loss(self(batch["past"]), batch["future"])
        self.log("val_error", error, batch_size=len(batch["past"]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.NAdam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [schedule]


def main() -> None:
    pl.seed_everything(2, verbose=False)
    steps = torch.arange(160.0)
    series = 20 + 3 * (steps / 6).sin() + 0.3 * torch.randn(160)
    train, held_out = Windows(series[:110]), Windows(series[110:])
    callbacks = [ModelCheckpoint(monitor="val_error", save_last=True), LearningRateMonitor()]
    trainer = pl.Trainer(max_epochs=6, callbacks=callbacks, log_every_n_steps=4)
    loaders = DataLoader(train, 16, shuffle=True, drop_last=True), DataLoader(held_out, 10)
    trainer.fit(Forecaster(float(series[:110].mean()), float(series[:110].std())), *loaders)


main()
