"""One folder per run: made, locked against other runs, and with the run's configuration in it."""

import errno
import fcntl
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lit_cifar.errors import ConfigError, printable
from lit_cifar.reporting.files import make_folder

LOCK, CONFIG = ".lock", "config.yaml"
SELDOM_S = 30.0  # between two drawings, or checkpoints of ends of epochs, unless epochs are counted
_MOST_BYTES, _DEEPEST = 2**20, 100  # of the settings of a run


class RunLock:
    """The lock of a run folder. Rank 0, the only writer, holds it from its look for a checkpoint until it ends.

    The kernel releases it when the process ends, also by SIGKILL, and programs that the process starts do not inherit
    it. On NFS other machines see it, and the server releases it when the holder's machine has been silent for a while.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, folder: Path) -> None:
        """Lock `folder` on rank 0, once; a `ConfigError` if another process has, or it has links to outside."""
        if self._descriptor is not None or process_rank() != 0:
            return
        with _refusing(folder):
            _check_links(folder)
            path = folder / LOCK
            if (folder / CONFIG).exists() and not path.exists() and not (folder / "checkpoints").exists():
                problem = f"{folder} is no run folder, and a run would replace its {CONFIG}"
                raise ConfigError(problem, remedy="pass another --run_dir")
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = printable(os.read(self._descriptor, 200).decode(errors="replace")) or "another process"
                remedy = f"wait for its end, or end it; if that machine is gone: rm {shlex.quote(str(path))}"
                raise ConfigError(f"the run folder {folder} is in use by {holder}", remedy=remedy) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                rank_zero_warn(f"the file system of {folder} has no locks: let no other process write to this folder")
            text = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, text.encode())

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _check_links(folder: Path) -> None:
    """Refuse links out of `folder`: the run would write through them, perhaps over others' files."""
    root = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            target = Path(os.path.realpath(path))  # also resolves links in a circle
            if path.is_symlink() and not target.is_relative_to(root):
                problem = f"{path} is a link to {target}, outside of the run folder, which the run would write over"
                raise ConfigError(problem, remedy="remove the link, or put a copy of what it leads to in its place")
            if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
                raise ConfigError(f"{path} is neither a file nor a folder", remedy="remove it")
        # W&B's folder below ours has one for each run, with links to logs in its cache. Nobody else writes there.
        folders[:] = [name for name in folders if Path(parent, name) != folder / "wandb"]


def create_run_folder(run_dir: str | None, *, label: str, lock: RunLock, resume: bool = False) -> Path:
    """Make the folder of a run and lock it, on rank 0; other ranks get a path that nothing is written to.

    It is `run_dir`, or `runs/<time>-<label>`, and must be empty unless a run is resumed in it, which has locked it.
    """
    folder = Path(run_dir) if run_dir else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{label}"
    if process_rank() != 0:
        return folder
    with _refusing(folder):
        if not str(folder).isprintable() or "://" in str(run_dir):  # checkpoints hold it
            problem = f"--run_dir={run_dir} is an address, or has characters that cannot be printed"
            raise ConfigError(problem, remedy="pass a folder of this machine")
        if run_dir is None:
            folder = _unused(folder)
            make_folder(folder.parent)
            folder.mkdir()  # an error if another run has made it in the same moment
        make_folder(folder)
        goes_on = resume and (lock._descriptor is not None or not (folder / CONFIG).exists())
        if not goes_on and any(path.name != LOCK for path in folder.iterdir()):
            other = shlex.quote(f"--run_dir={_unused(folder)}")
            raise ConfigError(f"the run folder {folder} is not empty, as a new run's is", remedy=f"pass {other}")
    lock.take(folder)
    return folder


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"the run folder {folder} cannot be written: {error.strerror}"
        raise ConfigError(problem, remedy="pass a folder that can: --run_dir=FOLDER") from error


def run_folder(trainer: Trainer) -> Path | None:
    """The folder for the run's files, the same on every process; None without loggers. Every process must call this."""
    log_dir = trainer.log_dir
    return Path(log_dir) if log_dir is not None and trainer.loggers else None


def file_in(folder: Path, name: str, *, remedy: str) -> Path:
    """A file of a run folder, which may be anybody's: a `ConfigError` if there is none, or a link leads out of it."""
    path = folder / name
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"no {name} in the run folder {folder}", remedy=remedy)
    return path


def read_config(folder: Path) -> dict[str, Any]:
    """The settings in a run folder."""
    return read_settings(file_in(folder, CONFIG, remedy="name the folder of a run"))


def of_checkpoint(path: Path) -> Path | None:
    """The run folder in which a checkpoint lies, if it has the settings of its run."""
    folder = path.absolute().parent.parent
    return folder if path.absolute().parent.name == "checkpoints" and (folder / CONFIG).exists() else None


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a file; a `ConfigError` for one that they cannot be in, such as one that grows.

    A run repeats no part by name: 250 characters can name one a billion times. Nor does it nest lists, which is slow.
    """
    depth = 0
    try:
        text = path.read_text() if path.stat().st_size <= _MOST_BYTES else ""
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
                raise ValueError("it would take all memory, or time")
        settings = yaml.safe_load(text)
    except (OSError, RecursionError, ValueError, yaml.YAMLError):
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} is not what a run writes there", remedy="move it away and pass the flags instead")
    return settings


def process_rank() -> int:
    """This process's rank, known from the launcher's environment variables before the process group exists."""
    return int(getattr(rank_zero_only, "rank", 0))


def _unused(folder: Path) -> Path:
    """`folder`, or the first with a number behind its name that is not there."""
    numbered = (Path(f"{folder}-{number}") for number in count(2))
    return next(path for path in chain([folder], numbered) if not path.exists())


class SavedConfig(SaveConfigCallback):
    """Saves the resolved configuration, without the flags that tie it to this run.

    These are `run_dir`, `resume`, and of a fit `ckpt_path`. A resumed run replaces the file at its first step alone.
    """

    def __init__(
        self, parser: LightningArgumentParser, config: Namespace, *, logger: Any, trains: bool, **kwargs: Any
    ) -> None:
        super().__init__(parser, config.clone(), **kwargs)
        self.overwrite = config.resume is not None  # a resumed run has a file already
        self._resumed = self.overwrite and config.ckpt_path is not None
        self.config.run_dir = self.config.resume = None
        if trains:
            self.config.ckpt_path = None
        self.config.trainer.logger = logger

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._resumed:
            super().setup(trainer, pl_module, stage)

    def settings(self) -> dict[str, Any]:
        return dict(yaml.safe_load(self.parser.dump(self.config, skip_unset=False)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")
