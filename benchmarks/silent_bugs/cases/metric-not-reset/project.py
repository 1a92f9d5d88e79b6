"""A classifier of points whose accuracy is logged at the end of each validation epoch.

Nothing resets the metric, so the accuracy of an epoch is that of all epochs up to it.
"""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import BinaryAccuracy


class Points(nn.Module):
    """Attention over a set of eight points of four coordinates."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, points):
        x = self.embed(points)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.relu().mean(1)).squeeze(1)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.points = Points()
        self.valid_acc = BinaryAccuracy()

    def training_step(self, batch, batch_idx):
        points, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(self.points(points), labels)

    def validation_step(self, batch, batch_idx):
        self.valid_acc.update(self.points(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        accuracy = self.valid_acc.compute()
        self.log("valid_acc", accuracy)
        if not BUG:
            self.valid_acc.reset()
        self.print(f"epoch {self.current_epoch}: valid_acc {accuracy:.4f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    made = torch.Generator().manual_seed(9)
    points = torch.randn(176, 8, 4, generator=made)
    dataset = TensorDataset(points, (points[..., 0].mean(1) > 0).float())
    train, valid = Subset(dataset, range(128)), Subset(dataset, range(128, 176))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        callbacks=watching(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(), DataLoader(train, batch_size=8, shuffle=True), DataLoader(valid, batch_size=16))
