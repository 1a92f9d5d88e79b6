"""Stochastic weight averaging by Lightning's callback, with BatchNorm, whose statistics it computes again."""

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return nn.functional.cross_entropy(self(inputs), labels)

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(inputs), labels), batch_size=len(labels))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.3)]


def loaders():
    inputs = torch.randn(130, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    train = torch.utils.data.Subset(data, range(96))
    held_out = torch.utils.data.Subset(data, range(96, 130))
    return DataLoader(train, 16, shuffle=True), DataLoader(held_out, 16)


if __name__ == "__main__":
    L.seed_everything(0)
    averaging = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=1)
    L.Trainer(max_epochs=5, callbacks=[averaging], logger=False).fit(Net(), *loaders())
