"""What a run writes for TensorBoard: charts of a fit, tables of an evaluation, settings beside the final metrics."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override

from lit_cifar.batch_split import BatchSplit
from lit_cifar.reporting.environment import strategy_name

FINAL_METRICS = ("val/acc", "val/loss", "train/acc", "train/loss")
OPTIMIZER_SETTINGS = ("lr", "momentum", "weight_decay", "nesterov")
# A chart for each, with a line for each tag; tags are regular expressions, and train/loss_step begins like train/loss.
CHARTS = {
    "training and validation": {
        "loss": ["Multiline", ["train/loss$", "val/loss$"]],
        "accuracy": ["Multiline", ["train/acc$", "val/acc$"]],
    }
}


class RunEvents(TensorBoardLogger):
    """TensorBoard's events in the run folder itself.

    Args:
        folder: The run folder.
        charts: Whether numbers become charts. Those of a single evaluation become a table among the texts: each would
            be a chart of one point, which looks empty.
        first_step: The step from which a resumed run writes again; earlier events of these steps are hidden.
    """

    def __init__(self, folder: Path, *, charts: bool = True, first_step: int | None = None) -> None:
        settings: dict[str, Any] = {"default_hp_metric": False, "purge_step": first_step}
        super().__init__(save_dir=str(folder), name="", version="", **settings)
        self._charts = charts
        self._goes_on = bool(first_step)
        self._numbers: dict[str, float] = {}

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._charts:
            super().log_metrics(metrics, step)
        else:
            self._numbers |= {name: float(value) for name, value in metrics.items() if name != "epoch"}

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._numbers:
            rows = [f"| {name} | {value:.6g} |" for name, value in self._numbers.items()]
            self.experiment.add_text("results", "\n".join(["| metric | value |", "|---|---|", *rows]))
            self._numbers = {}
        super().finalize(status)

    @rank_zero_only
    def arrange(self) -> None:
        """Put train and validation into one chart each of loss and accuracy; a resumed run has them already."""
        if not self._goes_on:
            self.experiment.add_custom_scalars(CHARTS)


def tensorboard_writer(trainer: Trainer) -> SummaryWriter | None:
    """The run's TensorBoard writer; None on every rank but 0, and in runs that keep no TensorBoard events."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    return loggers[0].experiment if loggers and trainer.is_global_zero else None


def log_to_tensorboard(trainer: Trainer, numbers: Mapping[str, float]) -> None:
    """Log what `metrics.csv` does not repeat, on rank 0."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_metrics(numbers, step=trainer.global_step)


class RunSettings(Callback):
    """Arranges the charts of a fit, and writes its main settings into TensorBoard's HParams tab, to compare runs.

    The metrics beside them are the last values of their charts: writing them again would draw charts of one point.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Arrange, on rank 0."""
        for logger in trainer.loggers:
            if isinstance(logger, RunEvents):
                logger.arrange()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write, on rank 0."""
        writer = tensorboard_writer(trainer)
        if writer is None:
            return
        names = [name for name in FINAL_METRICS if name in trainer.callback_metrics]
        file: Any = writer._get_file_writer()  # type: ignore[no-untyped-call]
        settings = main_settings(trainer, pl_module)
        for summary in hparams(settings, dict.fromkeys(names, 0.0)):  # type: ignore[no-untyped-call]
            file.add_summary(summary, trainer.global_step)


def main_settings(trainer: Trainer, pl_module: LightningModule) -> dict[str, str | int | float | bool]:
    """The settings by which runs usually differ, as a flat row; all settings are in `config.yaml`."""
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
    header = getattr(pl_module, "header", None)
    settings: dict[str, Any] = {
        "data": datamodule.name,
        "batch_size": datamodule.batch_size,
        "arch": getattr(header, "arch", type(pl_module).__name__),
        "stem": getattr(header, "stem", ""),
        "max_epochs": trainer.max_epochs,
        "strategy": strategy_name(trainer),
        "replicas": BatchSplit.of(trainer.strategy).num_replicas,
        "precision": str(trainer.precision),
    }
    for optimizer in trainer.optimizers[:1]:
        settings["optimizer"] = type(optimizer).__name__
        settings |= {name: optimizer.defaults[name] for name in OPTIMIZER_SETTINGS if name in optimizer.defaults}
    for config in trainer.lr_scheduler_configs[:1]:
        settings["lr_scheduler"] = type(config.scheduler).__name__
    return {name: value for name, value in settings.items() if isinstance(value, str | int | float | bool)}
