"""The two loggers of a run, TensorBoard's events and `metrics.csv`, also of a run that is resumed."""

import csv
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override

from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.reporting.environment import strategy_name
from lit_cifar.reporting.files import replace_csv
from lit_cifar.reporting.run_folder import process_rank

FINAL_METRICS = ("val/acc", "val/loss", "train/acc", "train/loss")
OPTIMIZER_SETTINGS = ("lr", "momentum", "weight_decay", "nesterov")
# A chart for each, with a line for each tag; tags are regular expressions, and train/loss_step begins like train/loss.
CHARTS = {
    "training and validation": {
        "loss": ["Multiline", ["train/loss$", "val/loss$"]],
        "accuracy": ["Multiline", ["train/acc$", "val/acc$"]],
    }
}


def run_loggers(
    folder: Path, *, charts: bool = True, kept_rows: int = 0, first_step: int | None = None
) -> list[Logger]:
    """TensorBoard events, `metrics.csv` and `hparams.yaml`, all in `folder` itself.

    With `charts` TensorBoard draws the numbers, see `RunEvents`. A resumed run keeps `kept_rows` lines of
    `metrics.csv`, those before its checkpoint, and writes the later ones again. It does so from `first_step` on, 0
    without a checkpoint: TensorBoard hides earlier events of these steps. None means a new run.
    """
    csv_logger = CSVLogger(save_dir=str(folder), name="", version="")
    if process_rank() == 0:
        csv_logger._experiment = _ContinuedWriter(csv_logger.log_dir, kept_rows=kept_rows)
    return [RunEvents(folder, charts=charts, first_step=first_step), csv_logger]


def logger_below(folder: Path, given: Namespace) -> Logger:
    """A logger that the user has added; a relative `save_dir` among its arguments is relative to the run folder."""
    arguments = {**given.get("init_args", {}), **given.get("dict_kwargs", {})}
    if "save_dir" in arguments:
        arguments["save_dir"] = str(folder / (arguments["save_dir"] or ""))
    logger: Logger = instantiate_class((), {"class_path": given.class_path, "init_args": arguments})
    return logger


class _ContinuedWriter(ExperimentWriter):
    """One row for each step, after the first lines of an existing `metrics.csv`, which Lightning would delete.

    What is logged of a step by several calls, as by training and validation at the end of an epoch, goes into one row.
    Learning rates, which are logged before the step, wait for the rest of their row.
    """

    def __init__(self, log_dir: str, *, kept_rows: int) -> None:
        super().__init__(log_dir)
        self._path = Path(self.metrics_file_path)
        self._last: dict[str, Any] = {}  # the file's last row, which may grow
        self._grows = False
        if self._path.exists():
            self._keep(kept_rows)

    def _check_log_dir_exists(self) -> None:
        """Do nothing: Lightning would delete the files."""

    def _keep(self, num_rows: int) -> None:
        """Cut the file to its first lines."""
        rows = self._rows()
        if not num_rows or not rows:
            self._path.unlink()
            return
        kept = rows[:num_rows]
        self._replace([*rows[0]], kept)
        self._last = {name: cell for name, cell in kept[-1].items() if cell}

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Add to the row of this step."""
        super().log_metrics(metrics_dict, step)
        row = self.metrics.pop()
        if self.metrics and self.metrics[-1]["step"] == row["step"]:
            self.metrics[-1] |= row
        elif not self.metrics and str(row["step"]) == str(self._last.get("step")):
            self._grows = True
            self.metrics.append(self._last | row)
        else:
            self.metrics.append(row)

    def save(self) -> None:
        """Append the new rows. The file is replaced, in one step, where a row or the header grows."""
        rates = self.metrics[-1:] if self.metrics and _holds_rates_alone(self.metrics[-1]) else []
        rows = [row for row in self.metrics if not _holds_rates_alone(row)]
        self.metrics = rates
        if not rows:
            return
        fields = sorted({*self.metrics_keys, *chain.from_iterable(rows)})
        if self._grows or fields != self.metrics_keys:
            before = self._rows()
            self._replace(fields, [*(before[:-1] if self._grows else before), *rows])
        else:
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, fields).writerows(rows)
        self._last, self._grows = rows[-1], False

    def _rows(self) -> list[dict[str, str]]:
        """Those in the file, if there is one."""
        if not self._path.exists():
            return []
        with self._path.open(newline="") as file:
            return [*csv.DictReader(file)]

    def _replace(self, fields: list[str], rows: list[dict[str, Any]]) -> None:
        """Replace the file, with the line ends that `csv.DictWriter` uses."""
        cells = [[row.get(name, "") for name in fields] for row in rows]
        replace_csv(self._path, [fields, *cells], lineterminator="\r\n")
        self.metrics_keys = fields


def _holds_rates_alone(row: dict[str, Any]) -> bool:
    return all(name == "step" or name.startswith("lr-") for name in row)


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
