"""Fits of a few steps in this process."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lit_cifar import CIFAR10DataModule
from lit_cifar.tools.modes import SILENT

# What Lightning says of this run, of few batches and in an old way of torch's.
short = pytest.mark.filterwarnings("ignore:.*(does not have many workers|smaller than the logging interval|LeafSpec)")


def data(**settings: Any) -> CIFAR10DataModule:
    sizes: dict[str, Any] = {"num_train": 40, "num_test": 1, "val_size": 8, "batch_size": 16}
    return CIFAR10DataModule(dataset="synthetic", **sizes | settings)


def fit(
    model: L.LightningModule,
    folder: Path,
    datamodule: CIFAR10DataModule | None = None,
    *,
    resume: Path | None = None,
    **settings: Any,
) -> L.Trainer:
    settings = SILENT | {"accelerator": "cpu", "devices": 1, "max_epochs": 1} | settings
    trainer = L.Trainer(default_root_dir=folder, **settings)
    trainer.fit(model, datamodule or data(), ckpt_path=resume)
    return trainer
