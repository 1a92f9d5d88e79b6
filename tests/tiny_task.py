"""A data module and a module whose every logit is known beforehand, for tests of callbacks in whole runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.loader import BatchLoader
from lit_cifar.data.samplers import EvaluationSampler
from lit_cifar.mode import Layout, mode_of
from lit_cifar.task.metrics import ConfusionMatrix
from lit_cifar.tools.modes import SILENT

CLASSES = ("T-shirt/top", "disc plain", "cat")


class TinyData(LightningDataModule):
    """Every image says in its first pixel which class the network takes it for, in its second how surely."""

    name = "tiny"
    classes = CLASSES
    source = SimpleNamespace(has_test=True)

    def __init__(self, *, num_images: int = 23, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8, generator=generator)
        images[:, 0, 0, 0] = torch.randint(0, 3, (num_images,), generator=generator)
        # Class 2 has no samples, so that empty classes are always part of the game.
        labels = torch.randint(0, 2, (num_images,), generator=generator)
        self.sets = {split: ImageSet(images, labels, CLASSES) for split in ("train", "val", "test", "predict")}

    def train_dataloader(self) -> BatchLoader:
        return self._batches("train")

    def val_dataloader(self) -> BatchLoader:
        return self._batches("val")

    def test_dataloader(self) -> BatchLoader:
        return self._batches("test")

    def predict_dataloader(self) -> BatchLoader:
        return self._batches("predict")

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch._replace(images=batch.images.float())

    def _batches(self, split: str) -> BatchLoader:
        return batches(self.sets[split], self.batch_size, mode_of(self.trainer.strategy).layout)


def batches(images: ImageSet, batch_size: int, layout: Layout) -> BatchLoader:
    """In the order of the images, without augmentation; the last ones of a rank may be empty."""
    return BatchLoader(images, EvaluationSampler(num_samples=len(images), batch_size=batch_size, layout=layout))


class ReadPixels(nn.Module):
    """Logits from the first two pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        classes, strength = images[:, 0, 0, 0].long(), images[:, 0, 0, 1] / 64
        return F.one_hot(classes, len(CLASSES)) * strength[:, None] * self.scale


class TinyTask(LightningModule):
    """The parts of LitResNet's interface that callbacks use."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.image_shape = ReadPixels(), (3, 32, 32)
        self.confusion = ConfusionMatrix(len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch.images), batch.labels)
        self.log("train/loss", loss.detach(), on_step=False, on_epoch=True, batch_size=len(batch.labels))
        self.log("train/loss_step", loss.detach(), batch_size=len(batch.labels))
        return loss

    def on_validation_epoch_start(self) -> None:
        self.confusion.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self(batch.images)
        self.confusion.update(logits, batch.labels)
        return logits

    def on_validation_epoch_end(self) -> None:
        truths, predictions, counts = self.confusion.compute().unbind(dim=1)
        self.log("val/acc", counts[truths == predictions].sum() / counts.sum(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch.images).softmax(dim=1)

    def confusion_matrix(self, split: str) -> ConfusionMatrix:
        return self.confusion

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)


def tiny_trainer(folder: Path, **settings: Any) -> Trainer:
    """A quiet trainer on the CPU that writes its events into `folder`."""
    logger = TensorBoardLogger(save_dir=str(folder), name="", version="", default_hp_metric=False)
    defaults = {"accelerator": "cpu", "devices": 1, "logger": logger, "max_epochs": 1, "log_every_n_steps": 1}
    return Trainer(**SILENT | defaults | settings)


def read_events(folder: Path) -> EventAccumulator:
    """What a run wrote for TensorBoard, nothing left out.

    TensorBoard reads files in the order of their names. Those of one second end with a count: 10 comes before 9.
    """
    for file in folder.glob("events.out.tfevents.*"):
        name, _, count = file.name.rpartition(".")
        file.rename(folder / f"{name}.{int(count):06d}")
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    return events.Reload()
