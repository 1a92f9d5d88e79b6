"""Labelled and unlabelled data from two loaders (CombinedLoader); consistency of predictions; two validation sets."""

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(220, 5, generator=draw)
        self.labels = (self.inputs[:, 0] * self.inputs[:, 1] > 0).long()

    def part(self, start: int, end: int) -> TensorDataset:
        return TensorDataset(self.inputs[start:end], self.labels[start:end])

    def train_dataloader(self):
        loaders = {
            "labelled": DataLoader(self.part(0, 40), batch_size=8, shuffle=True, drop_last=True),
            "unlabelled": DataLoader(self.part(40, 160), batch_size=16, shuffle=True, drop_last=True),
        }
        return CombinedLoader(loaders, "max_size_cycle")

    def val_dataloader(self):
        return [DataLoader(self.part(160, 190), batch_size=10), DataLoader(self.part(190, 220), batch_size=12)]


class Consistent(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch["labelled"]
        loss = F.cross_entropy(self.net(inputs), labels)
        unlabelled, _ = batch["unlabelled"]
        first, second = self.net(unlabelled).softmax(1), self.net(unlabelled).softmax(1)
        consistency = (first - second.detach()).square().sum(1).mean()
        self.log_dict({"supervised": loss, "consistency": consistency}, batch_size=len(labels))
        return loss + 0.5 * consistency

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        inputs, labels = batch
        self.log("val_loss", F.cross_entropy(self.net(inputs), labels), batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    L.Trainer(max_epochs=3, callbacks=[]).fit(Consistent(), datamodule=Data())
