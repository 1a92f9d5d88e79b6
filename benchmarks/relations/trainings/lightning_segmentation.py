"""Masks of pictures, with metrics of torchmetrics over the whole set, a weighted sampler's own epochs, and OneCycle."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryF1Score, BinaryJaccardIndex


class Segmenter(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))
        self.up = nn.Sequential(nn.ConvTranspose2d(width, width, 2, stride=2), nn.ReLU(), nn.Conv2d(width, 1, 1))
        self.overlap, self.f1 = BinaryJaccardIndex(), BinaryF1Score()

    def forward(self, pictures):
        return self.up(self.down(pictures))

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        chance = logits.sigmoid()
        dice = 1 - 2 * (chance * batch[1]).sum((1, 2, 3)) / (chance + batch[1]).sum((1, 2, 3))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch[1]) + dice.mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.overlap.update(logits.sigmoid(), batch[1].int())
        self.f1.update(logits.sigmoid(), batch[1].int())
        self.log("val_overlap", self.overlap)
        self.log("val_f1", self.f1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=max(2, int(steps)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Masks(pl.LightningDataModule):
    def setup(self, stage: str | None = None) -> None:
        made = torch.Generator().manual_seed(4)
        masks = (torch.rand(80, 1, 4, 4, generator=made) > 0.7).float().repeat_interleave(4, 2).repeat_interleave(4, 3)
        pictures = masks + 0.4 * torch.randn(80, 1, 16, 16, generator=made)
        self.train_set, self.val_set = (
            TensorDataset(pictures[:56], masks[:56]),
            TensorDataset(pictures[56:], masks[56:]),
        )

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=8, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=8)


if __name__ == "__main__":
    pl.seed_everything(9)
    trainer = pl.Trainer(max_epochs=5, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="auto", devices=1)
    trainer.fit(Segmenter(), datamodule=Masks())
