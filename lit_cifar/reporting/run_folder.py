"""One folder per run, and the two loggers that write into it, also for a resumed run."""

import csv
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from lit_cifar.errors import ConfigError
from lit_cifar.reporting.csv_files import replace_csv
from lit_cifar.reporting.run_lock import LOCK, RunLock
from lit_cifar.reporting.synced_files import make_folder, sync
from lit_cifar.reporting.tensorboard import RunEvents


def create_run_folder(run_dir: str | None, *, label: str, lock: RunLock, resume: bool = False) -> Path:
    """Make the folder of a run and lock it, on rank 0; other ranks get a path that nothing is written to.

    It is `run_dir`, or `runs/<time>-<label>`, and must be empty unless a run is resumed in it.
    """
    folder = Path(run_dir) if run_dir else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{label}"
    if process_rank() != 0:
        return folder
    with _refusing(folder):
        if run_dir is None:
            folder = _make_unused(folder)
        make_folder(folder)
        if not resume and any(path.name != LOCK for path in folder.iterdir()):
            raise ConfigError(
                f"the run folder {folder} is not empty, and a new run needs an empty one",
                remedy="choose another, e.g. " + shlex.quote(f"--run_dir={next(_names(folder))}"),
            )
        lock.take(folder)
    return folder


def lock_run_folder(run_dir: str, lock: RunLock) -> None:
    """Lock the folder of a run that is resumed, on rank 0, before its checkpoints are read; it may not be there yet."""
    if process_rank() == 0 and Path(run_dir).is_dir():
        with _refusing(Path(run_dir)):
            lock.take(Path(run_dir))


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be written: {error.strerror}",
            remedy="pass a folder that can: --run_dir=FOLDER",
        ) from error


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
        self._last: dict[str, Any] = {}  # the file's last row, which may grow
        self._grows = False
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if path.exists():
            self.metrics_keys, self._last = _keep_rows(path, kept_rows)

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
        self.metrics = [row for row in self.metrics if not _holds_rates_alone(row)]
        if self.metrics:
            self._last = self.metrics[-1]
            if self._grows:
                self._replace_last_row()
            super().save()
        self.metrics = rates

    def _replace_last_row(self) -> None:
        """Replace the file's last row by the first of the new ones."""
        grown = self.metrics.pop(0)
        self._grows = False
        fields = sorted({*self.metrics_keys, *grown})
        self.metrics_keys = fields
        _replace_metrics(Path(self.metrics_file_path), [fields, *self._rows(fields)[:-1], _cells(grown, fields)])

    def _check_log_dir_exists(self) -> None:
        """Do nothing: Lightning would delete the files."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        """Add columns so that a run that is killed never leaves half a table."""
        _replace_metrics(Path(self.metrics_file_path), [fieldnames, *self._rows(fieldnames)])

    def _rows(self, fields: list[str]) -> list[list[Any]]:
        """Those in the file, with these columns."""
        with Path(self.metrics_file_path).open(newline="") as file:
            return [_cells(row, fields) for row in csv.DictReader(file)]


def _holds_rates_alone(row: dict[str, Any]) -> bool:
    return all(name == "step" or name.startswith("lr-") for name in row)


def _cells(row: dict[str, Any], fields: list[str]) -> list[Any]:
    return [row.get(name, "") for name in fields]


def _keep_rows(path: Path, num_rows: int) -> tuple[list[str], dict[str, Any]]:
    """Cut a table to its first lines, and return the names of its columns and the last line."""
    with path.open(newline="") as file:
        rows: list[list[str]] = [*csv.reader(file)]
    header = rows.pop(0) if rows else []
    if not num_rows or not header:
        path.unlink()
        return [], {}
    kept = rows[:num_rows]
    _replace_metrics(path, [header, *kept])
    return header, {name: cell for name, cell in zip(header, kept[-1], strict=False) if cell} if kept else {}


def _replace_metrics(path: Path, rows: list[list[Any]]) -> None:
    """Replace the file, with the line ends that Lightning's writer uses."""
    replace_csv(path, rows, lineterminator="\r\n")


def process_rank() -> int:
    """This process's rank; before the process group exists, from the launcher's environment variables."""
    return int(getattr(rank_zero_only, "rank", 0))


def _make_unused(folder: Path) -> Path:
    """Make `folder`, or one with a number behind its name. Another run may be doing so in the same moment."""
    make_folder(folder.parent)
    for candidate in chain([folder], _names(folder)):
        with suppress(FileExistsError):
            candidate.mkdir()
            break
    sync(folder.parent)
    return candidate


def _names(folder: Path) -> Iterator[Path]:
    """Paths of nothing so far, for a folder beside `folder`."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return (name for name in names if not name.exists())
