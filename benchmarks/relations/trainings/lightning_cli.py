"""LightningCLI: a module and a datamodule with options, as in `lightning_cli.py fit --model.width=24`."""

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self, width: int = 16, lr: float = 0.01, frozen: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(9, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 4)
        self.net[:frozen].requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(inputs))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.log("val_acc", (self(inputs).argmax(1) == labels).double().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)}


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 32, seed: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        inputs = torch.randn(300, 9, generator=torch.Generator().manual_seed(self.hparams.seed))
        self.data = TensorDataset(inputs, inputs[:, :4].argmax(1))

    def train_dataloader(self):
        part = torch.utils.data.Subset(self.data, range(100))
        return DataLoader(part, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(torch.utils.data.Subset(self.data, range(100, 300)), self.hparams.batch_size)


if __name__ == "__main__":
    LightningCLI(Model, Data, seed_everything_default=1, trainer_defaults={"max_epochs": 3})
