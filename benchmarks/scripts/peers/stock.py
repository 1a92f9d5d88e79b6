"""Lightning as its guide shows it. `python stock.py ROOT EPOCHS [CHECKPOINT]`."""

import os
import sys

import lightning as L
import torch
from plain import AUGMENTED, NORMALISED
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import multiclass_accuracy
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18
from torchvision.transforms import Compose


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = resnet18(num_classes=10)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        accuracy = multiclass_accuracy(self.network(images), labels, num_classes=10, average="micro")
        self.log("val/acc", accuracy, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    root, epochs, *checkpoint = sys.argv[1:]
    train = DataLoader(CIFAR10(root, transform=AUGMENTED), batch_size=128, shuffle=True, num_workers=2)
    test = DataLoader(CIFAR10(root, train=False, transform=Compose(NORMALISED)), batch_size=500, num_workers=2)
    trainer = L.Trainer(max_epochs=int(epochs), accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")))
    trainer.fit(Classifier(), train, test, ckpt_path=checkpoint[0] if checkpoint else None)
