"""TensorBoard's writer, and the settings of a run with its final metrics."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from lit_cifar.layout import Layout
from lit_cifar.reporting.environment import strategy_name

FINAL_METRICS = ("val/acc", "val/loss", "train/acc", "train/loss")
OPTIMIZER_SETTINGS = ("lr", "momentum", "weight_decay", "nesterov")


def tensorboard_writer(trainer: Trainer) -> SummaryWriter | None:
    """The run's TensorBoard writer; None on every rank but 0, and in runs that keep no TensorBoard events."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    return loggers[0].experiment if loggers and trainer.is_global_zero else None


class FinalSettings(Callback):
    """Writes the main settings and the final metrics of a fit into TensorBoard's HParams tab, to compare runs.

    Needs `TensorBoardLogger(default_hp_metric=False)`; without it there is a column `hp_metric` with the value -1.
    """

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write, on rank 0."""
        metrics = {
            f"final/{name.replace('/', '_')}": float(trainer.callback_metrics[name])
            for name in FINAL_METRICS
            if name in trainer.callback_metrics
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.log_hyperparams(main_settings(trainer, pl_module), metrics, step=trainer.global_step)


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
        "replicas": Layout.of(trainer.strategy).num_replicas,
        "precision": str(trainer.precision),
    }
    for optimizer in trainer.optimizers[:1]:
        settings["optimizer"] = type(optimizer).__name__
        settings |= {name: optimizer.defaults[name] for name in OPTIMIZER_SETTINGS if name in optimizer.defaults}
    for config in trainer.lr_scheduler_configs[:1]:
        settings["lr_scheduler"] = type(config.scheduler).__name__
    return {name: value for name, value in settings.items() if isinstance(value, str | int | float | bool)}
