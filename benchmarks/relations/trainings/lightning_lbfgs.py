"""Full-batch logistic regression by LBFGS, whose closure Lightning gives to the optimizer (one batch)."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Logistic(L.LightningModule):
    def __init__(self, penalty: float = 1e-3) -> None:
        super().__init__()
        self.penalty = penalty
        self.layer = nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layer(inputs), labels)
        return loss + self.penalty * self.layer.weight.square().sum()

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layer(inputs), labels)
        self.log("val_loss", loss, on_epoch=True, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, history_size=5)


L.seed_everything(0)
inputs = torch.randn(100, 6)
labels = (inputs @ torch.randn(6, 3) + torch.randn(100, 3)).argmax(1)
train, held_out = TensorDataset(inputs[:64], labels[:64]), TensorDataset(inputs[64:], labels[64:])
trainer = L.Trainer(max_epochs=6, log_every_n_steps=1)
trainer.fit(Logistic(), DataLoader(train, batch_size=len(train)), DataLoader(held_out, batch_size=len(held_out)))
