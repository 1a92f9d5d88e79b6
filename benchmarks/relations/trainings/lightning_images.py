"""Small images: BatchNorm, dropout, random flips and shifts in the data set, label smoothing, OneCycle."""

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    def __init__(self, count: int, seed: int, augment: bool) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (count,), generator=draw)
        self.images = torch.randn(count, 1, 8, 8, generator=draw) + self.labels[:, None, None, None]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        image = self.images[index]
        if self.augment:
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
            image = image.roll(int(torch.randint(-1, 2, ())), dims=-2)
        return image, self.labels[index]


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Shapes(100, 0, augment=True), batch_size=16, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Shapes(45, 1, augment=False), batch_size=16)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 16, 4)),
        )
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = self.loss(self.net(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        self.accuracy(logits, labels)
        self.log("val/acc", self.accuracy)
        self.log("val/loss", self.loss(logits, labels), batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(1)
    callbacks = [ModelCheckpoint(monitor="val/acc", mode="max"), LearningRateMonitor()]
    L.Trainer(max_epochs=4, callbacks=callbacks).fit(Classifier(), datamodule=Data())
