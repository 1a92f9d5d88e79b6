"""A training that knows nothing of lit_cifar, but for two lines: is what two processes train what one would?

python examples/replay_a_module.py
"""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import Replay


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3),
            torch.nn.BatchNorm2d(16),
            torch.nn.GELU(),
            torch.nn.Dropout(0.1),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(256, 3),
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(0, workers=True)
    data = TensorDataset(torch.randn(512, 1, 20, 20), torch.randint(0, 3, (512,)))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    trainer = pl.Trainer(accelerator="cpu", strategy="ddp", devices=2, max_epochs=2, callbacks=[Replay()])
    trainer.fit(Classifier(), loader)
