"""`config.yaml` in the run folder."""

from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback


class SavedConfig(SaveConfigCallback):
    """Saves the resolved configuration, without the flags that tie it to this run.

    These are `run_dir`, `resume` and, of a fit, `ckpt_path`: a command that reads the file has a run folder of its own
    and names its checkpoint itself. Of `kernels` only what it has chosen is kept. A resumed run replaces the file at
    its first step, so that a run that is refused or has no step left does not.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, *, logger: Any, **kwargs: Any) -> None:
        super().__init__(parser, config.clone(), **kwargs)
        self.overwrite = config.resume is not None  # the file of the run before it was interrupted
        self._resumed = self.overwrite and config.ckpt_path is not None
        self.config.run_dir = self.config.resume = self.config.kernels = None
        self.config.trainer.logger = logger

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save, unless the run is resumed."""
        if stage == "fit":
            self.config.ckpt_path = None
        if not self._resumed:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if that was not done in `setup`."""
        super().setup(trainer, pl_module, "fit")
