"""The two loggers of a new or resumed run: TensorBoard's events and `metrics.csv`."""

import csv
import textwrap
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch.utils.tensorboard import SummaryWriter

from lit_cifar.configured import arguments_of, made
from lit_cifar.errors import ConfigError, one_line
from lit_cifar.reporting.files import read_csv, replace_csv
from lit_cifar.reporting.run_folder import process_rank


def run_loggers(folder: Path, *, kept_rows: int = 0, first_step: int | None = None) -> list[Logger]:
    """TensorBoard events, `metrics.csv` and `hparams.yaml`, all in `folder` itself.

    A resumed run keeps `kept_rows` lines of `metrics.csv`, those before its checkpoint, and writes the later ones
    again, from `first_step` on (0 without a checkpoint, None in a new run): TensorBoard hides earlier events of them.
    """
    csv_logger = CSVLogger(save_dir=str(folder), name="", version="")
    if process_rank() == 0:
        csv_logger._experiment = _ContinuedWriter(csv_logger.log_dir, kept_rows=kept_rows)
    settings: dict[str, Any] = {"default_hp_metric": False, "purge_step": first_step}
    return [TensorBoardLogger(save_dir=str(folder), name="", version="", **settings), csv_logger]


def logger_below(folder: Path, given: Namespace, settings: Mapping[str, Any]) -> Logger:
    """A logger that the user has added; a relative `save_dir` among its arguments is relative to the run folder.

    Rank 0 hands it the settings of the run, because some loggers connect only when they are first used.

    Raises:
        ConfigError: The logger cannot be used, whatever it raises: packages have errors of their own for a server that
            is not there, a missing key, or a store that they refuse.
    """
    arguments = arguments_of(given)
    if given.class_path.endswith(".CometLogger") and arguments.get("online") is False:
        problem = "--trainer.logger=CometLogger with online=false would record nothing: Lightning 2.6.6 disables it"
        raise ConfigError(problem, remedy="leave it out, or pass WandbLogger with --trainer.logger.offline=true")
    if "save_dir" in arguments:
        arguments["save_dir"] = str(folder / (arguments["save_dir"] or ""))
    try:
        logger: Logger = made(given, **arguments)
        if process_rank() == 0:
            logger.log_hyperparams({**settings})
    except Exception as error:
        name = given.class_path.rpartition(".")[2]
        said = f"--trainer.logger={name} cannot be used: {one_line(error)}"
        problem = textwrap.fill(said, 250, max_lines=4, break_on_hyphens=False)
        raise ConfigError(problem, remedy=f"mend that, or leave out {name}, which the run does not need") from error
    return logger


class _ContinuedWriter(ExperimentWriter):
    """One row for each step, after the first lines of an existing `metrics.csv`, which Lightning would delete.

    Values that several calls log for a step, such as training and validation at the end of an epoch, go into one row.
    Learning rates, which are logged before the step, wait for the rest of their row.
    """

    def __init__(self, log_dir: str, *, kept_rows: int) -> None:
        super().__init__(log_dir)
        self._path = Path(self.metrics_file_path)
        self._last: dict[str, Any] = {}  # the file's last row, which may grow
        self._grows = False
        if kept := self._rows()[:kept_rows]:
            self._replace([*kept[0]], kept)
            self._last = {name: cell for name, cell in kept[-1].items() if cell}
        else:
            self._path.unlink(missing_ok=True)

    def _check_log_dir_exists(self) -> None:
        """Do nothing: Lightning would delete the files."""

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics_dict, step)
        row = self.metrics.pop()
        if self.metrics and self.metrics[-1]["step"] == row["step"]:
            row = self.metrics.pop() | row
        elif not self.metrics and str(row["step"]) == str(self._last.get("step")):
            self._grows, row = True, self._last | row
        self.metrics.append(row)

    def save(self) -> None:
        """Append the new rows. The file is replaced, in one step, where a row or the header grows."""
        rows = [row for row in self.metrics if not _holds_rates_alone(row)]
        self.metrics = [row for row in self.metrics[-1:] if _holds_rates_alone(row)]
        if not rows:
            return
        fields = sorted({*self.metrics_keys, *chain.from_iterable(rows)})
        if self._grows or fields != self.metrics_keys:
            before = self._rows()
            self._replace(fields, [*(before[:-1] if self._grows else before), *rows])
        else:
            with self._path.open("a", newline="", encoding="utf-8", errors="surrogateescape") as file:
                csv.DictWriter(file, fields, lineterminator="\n").writerows(rows)
        self._last, self._grows = rows[-1], False

    def _rows(self) -> list[dict[str, str]]:
        header, *rows = read_csv(self._path) or [[]]
        return [dict(zip(header, row, strict=False)) for row in rows]

    def _replace(self, fields: list[str], rows: list[dict[str, Any]]) -> None:
        replace_csv(self._path, [fields, *([row.get(name, "") for name in fields] for row in rows)])
        self.metrics_keys = fields


def _holds_rates_alone(row: dict[str, Any]) -> bool:
    return all(name == "step" or name.startswith("lr-") for name in row)


def tensorboard_writer(trainer: Trainer) -> SummaryWriter | None:
    """The run's TensorBoard writer; None on every rank but 0, and in runs that keep no TensorBoard events."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    return loggers[0].experiment if loggers and trainer.is_global_zero else None


def log_to_tensorboard(trainer: Trainer, numbers: Mapping[str, float]) -> None:
    """Log what `metrics.csv` does not repeat, on rank 0."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_metrics(numbers, step=logged_step(trainer))


def logged_step(trainer: Trainer) -> int:
    """The step at which Lightning logs an evaluation: in a fit the training batch before it, counted from 0."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
