"""Semantic segmentation of small point clouds with Lightning on two processes, followed by mIoU and its best value."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric
from torchmetrics.classification import MulticlassConfusionMatrix

CLASSES = 4


class ConfusionMatrix(MulticlassConfusionMatrix):
    """With the scores of semantic segmentation."""

    def iou(self):
        confmat = self.confmat if BUG else self.compute()
        confmat = confmat.to(torch.get_default_dtype())
        true = confmat.diag()
        union = confmat.sum(0) + confmat.sum(1) - true
        return true / union, union > 0

    def miou(self):
        iou, seen = self.iou()
        return iou[seen].mean()


class PointNet(nn.Module):
    """Points see their own features and those of the whole cloud."""

    def __init__(self, size=32):
        super().__init__()
        self.points = nn.Sequential(nn.Linear(4, size), nn.LayerNorm(size), nn.ReLU(), nn.Linear(size, size))
        self.head = nn.Sequential(nn.Linear(2 * size, size), nn.ReLU(), nn.Linear(size, CLASSES))

    def forward(self, x):
        x = self.points(x)
        cloud = x.amax(1, keepdim=True).expand_as(x)
        return self.head(torch.cat([x, cloud], 2))


class SemanticSegmentationModule(pl.LightningModule):
    def __init__(self, net, lr=5e-3):
        super().__init__()
        self.net, self.lr = net, lr
        self.criterion = nn.CrossEntropyLoss()
        self.val_cm = ConfusionMatrix(CLASSES)
        self.val_miou_best = MaxMetric()
        self.val_miou_best.persistent(True)

    def model_step(self, batch):
        points, labels = batch
        logits = self.net(points)
        return self.criterion(logits.flatten(0, 1), labels.flatten()), logits.argmax(2), labels

    def training_step(self, batch, batch_idx):
        loss, _, _ = self.model_step(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, preds, labels = self.model_step(batch)
        self.val_cm.update(preds.flatten(), labels.flatten())
        self.log("val/loss", loss, batch_size=len(labels), on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self):
        miou = self.val_cm.miou()
        self.val_miou_best.update(miou)
        self.log("val/miou", miou, sync_dist=True)
        self.log("val/miou_best", self.val_miou_best.compute(), sync_dist=True)
        self.val_cm.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def clouds(count, seed, points=48):
    """Rooms: floor, walls, a table at a height of its own, and clutter; x, y, z and a colour with noise."""
    made = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor([4.0, 3.0, 2.0, 1.0]).expand(count, -1), points, True, generator=made)
    places = torch.rand(count, points, 3, generator=made)
    table = 0.25 + 0.3 * torch.rand(count, 1, generator=made)
    x, y, z = places.unbind(2)
    z = torch.where(labels == 0, 0.05 * z, torch.where(labels == 2, table, z))
    x = torch.where(labels == 1, (x > 0.5).to(x), x)
    colour = torch.tensor([0.2, 0.5, 0.8, 0.5])[labels] + 0.2 * torch.randn(count, points, generator=made)
    noisy = torch.stack([x, y, z], 2) + 0.04 * torch.randn(count, points, 3, generator=made)
    return TensorDataset(torch.cat([noisy, colour[..., None]], 2), labels)


if __name__ == "__main__":
    pl.seed_everything(SEED, workers=True, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=3,
        callbacks=[ModelCheckpoint("checkpoints", monitor="val/miou", mode="max", save_last=True), *watching()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    train = DataLoader(clouds(128, seed=1), batch_size=8, shuffle=True)
    val = DataLoader(clouds(24, seed=2), batch_size=4)
    trainer.fit(SemanticSegmentationModule(PointNet()), train, val)
    if trainer.is_global_zero:
        print({name: round(value.item(), 6) for name, value in trainer.callback_metrics.items()})
