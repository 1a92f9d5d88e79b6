"""What a command starts from: here a fit that starts from nothing. `checkpoint_selection` has the others."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lit_cifar.checkpoint.exact_resume import StartingPoint
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.dataset import Dataset
from lit_cifar.errors import ConfigError
from lit_cifar.task.module import LitResNet


class Start:
    """No checkpoint, but possibly weights that the model was given."""

    def __init__(self) -> None:
        self.point = StartingPoint(None, "no checkpoint")
        self.position: dict[str, Any] = {}  # position of the run that is resumed in its own folder; empty for a new run

    def name_classes(self, data: Dataset) -> None:
        """Let `data` do without the pictures of the training, if a checkpoint names their classes."""

    def check(self, module: LitResNet, data: CIFAR10DataModule, trainer: Trainer) -> None:
        """Refuse a checkpoint of a different network or different classes; load given weights at once."""
        module.start_from_weights()

    def compare_images(self, data: CIFAR10DataModule) -> None:
        """Refuse to go on with other images."""


def check_unasked_resume(trainer: Any) -> None:
    """Refuse a fit that Lightning would begin with a file that another has left."""
    saving = [c for c in trainer.callbacks if isinstance(c, OnExceptionCheckpoint)]
    left = [Path(callback.ckpt_path) for callback in saving if Path(callback.ckpt_path).exists()]
    if SLURMEnvironment.detect():
        left += sorted(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"))
    if left:
        problem = f"{left[-1]} is there, and Lightning would resume from it unasked"
        raise ConfigError(problem, remedy="move it, and pass it as --ckpt_path to go on from it")
