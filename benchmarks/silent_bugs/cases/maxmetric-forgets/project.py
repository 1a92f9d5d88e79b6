"""An autoencoder that logs, beside the score of each epoch, the best score so far.

Logging the metric object also resets it, so the best score is the score of the last epoch.
"""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, R2Score


class Autoencoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 16))
        self.val_r2 = R2Score()
        self.val_r2_best = MaxMetric()

    def training_step(self, batch, batch_idx):
        (inputs,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(inputs)), inputs)

    def validation_step(self, batch, batch_idx):
        (inputs,) = batch
        self.val_r2.update(self.decoder(self.encoder(inputs)).flatten(), inputs.flatten())

    def on_validation_epoch_end(self):
        score = self.val_r2.compute()
        self.val_r2.reset()
        self.val_r2_best.update(score)
        self.log("val_r2", score)
        self.log("val_r2_best", self.val_r2_best if BUG else self.val_r2_best.compute())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.03)


class Print(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        metrics = {name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()}
        print("epoch", trainer.current_epoch, metrics)


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    made = torch.Generator().manual_seed(6)
    factors = torch.randn(80, 3, generator=made)
    data = factors @ torch.randn(3, 16, generator=made) + 0.3 * torch.randn(80, 16, generator=made)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=12,
        callbacks=[Print(), *watching()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    train, val = TensorDataset(data[:64]), TensorDataset(data[64:])
    trainer.fit(Autoencoder(), DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=8))
