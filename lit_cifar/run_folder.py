"""One folder per run, and the two loggers that write into it."""

from datetime import datetime
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lit_cifar.errors import ConfigError


def create_run_folder(run_dir: str | None, *, label: str) -> Path:
    """Make the folder of a new run, on rank 0; other ranks get a path that nothing is written to.

    Args:
        run_dir: The folder the user wants, or None for `runs/<time>-<label>`.
        label: Subcommand and mode, e.g. "fit-ddp".

    Raises:
        ConfigError: The folder already holds something, or cannot be made.
    """
    folder = Path(run_dir) if run_dir else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{label}"
    if process_rank() != 0:
        return folder
    if run_dir is None:
        folder = _unused(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = any(folder.iterdir())
        if not occupied:
            _probe(folder)
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be written: {error.strerror}",
            remedy="pass a folder that can: --run_dir=FOLDER",
        ) from error
    if occupied:
        raise ConfigError(
            f"the run folder {folder} already holds a run, which stays as it is",
            remedy=f"choose another, e.g. --run_dir={_unused(folder)}",
        )
    return folder


def run_loggers(folder: Path) -> list[Logger]:
    """TensorBoard events, `metrics.csv` and `hparams.yaml`, all in `folder` itself.

    The CSV logger warns about a folder that is not empty, so it is opened first.
    """
    csv = CSVLogger(save_dir=str(folder), name="", version="")
    _ = csv.experiment
    tensorboard = TensorBoardLogger(save_dir=str(folder), name="", version="", default_hp_metric=False)
    return [tensorboard, csv]


def process_rank() -> int:
    """This process's rank as far as it is known before the processes have met: from the launcher's variables."""
    return int(getattr(rank_zero_only, "rank", 0))


def _unused(folder: Path) -> Path:
    candidate, number = folder, 2
    while candidate.exists():
        candidate = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return candidate


def _probe(folder: Path) -> None:
    """Write and remove a file: the rights of an existing folder say too little (read-only mounts, quotas)."""
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()
