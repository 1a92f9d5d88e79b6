"""One folder per run, and the two loggers that write into it, also for a resumed run."""

import csv
from datetime import datetime
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from lit_cifar.errors import ConfigError
from lit_cifar.reporting.csv_files import replace_csv


def create_run_folder(run_dir: str | None, *, label: str, resume: bool = False) -> Path:
    """Make the folder of a run, on rank 0; other ranks get a path that nothing is written to.

    It is `run_dir`, or `runs/<time>-<label>`, and must be empty unless a run is resumed in it.
    """
    folder = Path(run_dir) if run_dir else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{label}"
    if process_rank() != 0:
        return folder
    if run_dir is None:
        folder = _unused(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = not resume and any(folder.iterdir())
        if not occupied:
            # The permissions of a folder do not show read-only mounts and quotas.
            (folder / ".writable").touch()
            (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be written: {error.strerror}",
            remedy="pass a folder that can: --run_dir=FOLDER",
        ) from error
    if occupied:
        raise ConfigError(
            f"the run folder {folder} is not empty, and a new run needs an empty one",
            remedy=f"choose another, e.g. --run_dir={_unused(folder)}",
        )
    return folder


def run_loggers(folder: Path, *, kept_rows: int = 0, first_step: int | None = None) -> list[Logger]:
    """TensorBoard events, `metrics.csv` and `hparams.yaml`, all in `folder` itself.

    A resumed run keeps `kept_rows` lines of `metrics.csv`, those before its checkpoint, and writes the later ones
    again. It does so from `first_step` on, 0 without a checkpoint: TensorBoard hides earlier events of these steps.
    None means a new run.
    """
    csv_logger = CSVLogger(save_dir=str(folder), name="", version="")
    if process_rank() == 0:
        csv_logger._experiment = _ContinuedWriter(csv_logger.log_dir, kept_rows=kept_rows)
    settings: dict[str, Any] = {"default_hp_metric": False, "purge_step": first_step}
    tensorboard = TensorBoardLogger(save_dir=str(folder), name="", version="", **settings)
    return [tensorboard, csv_logger]


def logger_below(folder: Path, given: Namespace) -> Logger:
    """A logger that the user has added; a relative `save_dir` among its arguments is relative to the run folder."""
    arguments = {**given.get("init_args", {}), **given.get("dict_kwargs", {})}
    if "save_dir" in arguments:
        arguments["save_dir"] = str(folder / (arguments["save_dir"] or ""))
    logger: Logger = instantiate_class((), {"class_path": given.class_path, "init_args": arguments})
    return logger


class _ContinuedWriter(ExperimentWriter):
    """Keeps the first lines of an existing `metrics.csv`, which Lightning's own writer would delete."""

    def __init__(self, log_dir: str, *, kept_rows: int) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if path.exists():
            self.metrics_keys = _keep_rows(path, kept_rows)

    def _check_log_dir_exists(self) -> None:
        """Do nothing: Lightning would delete the files."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        """Add columns so that a run that is killed never leaves half a table."""
        path = Path(self.metrics_file_path)
        with path.open(newline="") as file:
            rows = [*csv.DictReader(file)]
        _replace_metrics(path, [fieldnames, *([row.get(name, "") for name in fieldnames] for row in rows)])


def _keep_rows(path: Path, num_rows: int) -> list[str]:
    """Cut a table to its first lines and return the names of its columns."""
    with path.open(newline="") as file:
        rows: list[list[str]] = [*csv.reader(file)]
    header = rows.pop(0) if rows else []
    if not num_rows or not header:
        path.unlink()
        return []
    _replace_metrics(path, [header, *rows[:num_rows]])
    return header


def _replace_metrics(path: Path, rows: list[list[str]]) -> None:
    """Replace the file, with the line ends that Lightning's writer uses."""
    replace_csv(path, rows, lineterminator="\r\n")


def process_rank() -> int:
    """This process's rank; before the process group exists, from the launcher's environment variables."""
    return int(getattr(rank_zero_only, "rank", 0))


def _unused(folder: Path) -> Path:
    candidate, number = folder, 2
    while candidate.exists():
        candidate = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return candidate
