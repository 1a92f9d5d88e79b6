"""A small convolutional classifier, stopped after two epochs and resumed for two more.

The third epoch should read the samples in an order of its own; it reads them in the order of the first.
"""

import os
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RUN_DIR = os.environ.setdefault("RUN_DIR", tempfile.mkdtemp())  # the other rank inherits it


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def make_trainer(epochs):
    return pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=epochs,
        callbacks=watching(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train_loader():
    made = torch.Generator().manual_seed(3)
    images = torch.randn(128, 1, 8, 8, generator=made)
    labels = images.unflatten(2, (2, 4)).mean((1, 3, 4)).argmax(1) + 2 * (images.mean((1, 2, 3)) > 0)
    workers = 2 if BUG else 0  # workers ask the sampler for indices before Lightning has told it the epoch
    return DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True, num_workers=workers)


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    checkpoint = Path(RUN_DIR) / "after-two-epochs.ckpt"
    trainer = make_trainer(epochs=2)
    trainer.fit(Classifier(), train_loader())
    trainer.save_checkpoint(checkpoint)

    model = Classifier()
    trainer = make_trainer(epochs=4)
    trainer.fit(model, train_loader(), ckpt_path=checkpoint, weights_only=False)
    if trainer.is_global_zero:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))
