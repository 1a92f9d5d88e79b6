"""What a command starts from: nothing, as a new training does, or a checkpoint (`checkpoint_selection`)."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lit_cifar.checkpoint.atomic import best_of
from lit_cifar.checkpoint.exact_resume import StartingPoint
from lit_cifar.cli.paths import expanded
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.dataset import Dataset
from lit_cifar.errors import ConfigError
from lit_cifar.reporting.run_folder import CONFIG, read_config
from lit_cifar.task.module import LitResNet


def spelled_out(words: list[str]) -> list[str]:
    """`words` with the flags that a run folder stands for in `test RUN_FOLDER`: its settings and best checkpoint."""
    if words[0] not in ("validate", "test", "predict") or len(words) == 1 or words[1].startswith("-"):
        return words
    command, folder, *flags = words
    folder = expanded(folder, given=folder)
    checkpoint = best_of(Path(folder))
    read_config(Path(folder))  # refuses a file that would take all memory, or time
    return [command, f"--config={Path(folder, CONFIG)}", f"--ckpt_path={checkpoint}", *flags]


class Start:
    """The start of a new training, without a checkpoint."""

    def __init__(self) -> None:
        self.point = StartingPoint(None, "no checkpoint")
        self.position: dict[str, Any] = {}  # position of the run that is resumed in its own folder; empty for a new run
        self.has_weights_alone = False  # whether the network only starts with the weights of the checkpoint

    def name_classes(self, data: Dataset) -> None:
        """Let `data` do without the pictures of the training, if the checkpoint names their classes."""

    def check(self, module: LitResNet, data: CIFAR10DataModule, trainer: Trainer) -> None:
        """Refuse a checkpoint of a different network or different classes; load weights alone at once."""
        module.start_from_weights()

    def compare_images(self, data: CIFAR10DataModule) -> None:
        """Refuse to go on with other images; of weights alone, with which a new training starts, this is told."""


def check_unasked_resume(trainer: Any, *, trains: bool) -> None:
    """Refuse a run that Lightning would begin with a file that another has left."""
    left = sorted(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt")) if SLURMEnvironment.detect() else []
    if left:
        raise ConfigError(
            f"{left[-1]} is there, and in a job of SLURM Lightning would load it unasked",
            remedy="move it, and pass it as --ckpt_path to go on from it",
        )
    for callback in trainer.callbacks:
        if trains and isinstance(callback, OnExceptionCheckpoint) and Path(callback.ckpt_path).exists():
            raise ConfigError(
                f"{callback.ckpt_path} is there, and with OnExceptionCheckpoint Lightning would resume from it unasked",
                remedy="move it, and pass it as --ckpt_path to go on from it; or pass another "
                "--trainer.callbacks.dirpath",
            )
