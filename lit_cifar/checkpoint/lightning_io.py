"""The plugin by which Lightning's Trainer and strategies write and read checkpoint files."""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lit_cifar.checkpoint.files import (
    LAST,
    carries_hash,
    save_error,
    snapshot,
    verify_checkpoint,
    what_is_left,
    write_checkpoint,
)
from lit_cifar.checkpoint.format import POSITION, read_checkpoint
from lit_cifar.errors import CheckpointError, ConfigError, SaveError, printable
from lit_cifar.reporting.files import make_folder, replacing, sync
from lit_cifar.watchdog.activity import HELPER

DIGESTS = "weights.sha256"  # in the run folder: a line for each epoch, by which two runs can be compared by eye
_DIGEST_LINE = re.compile(r"[0-9a-f]{64}  epoch (\d+)")


class CheckpointFiles(CheckpointIO):
    """Writes files with `write_checkpoint`, and reads tensors and primitives only.

    Pass it to the Trainer: `plugins=[CheckpointFiles()]`. Lightning's own `TorchCheckpointIO` continues silently if it
    has no permission to write, and leaves `weights_only` to an environment variable.

    What is saved under `deferring(behind=True)` is copied at once and written by a thread while training continues. At
    most two copies exist: of the file that is being written, and of the next one. Lightning's `AsyncCheckpointIO` keeps
    any number of copies, cannot say when a file is complete, and raises errors on rank 0 only.
    """

    def __init__(self) -> None:
        self.failure: CheckpointError | None = None  # of a save under `deferring`, or of one before it
        self._deferring = self._behind = False
        self._folders: set[Path] = set()
        self._writer = _Writer()

    @contextmanager
    def deferring(self, *, behind: bool = False) -> Iterator[None]:
        """Store a failure in `failure` instead of raising it, so that the caller can tell the other processes.

        Lightning calls `save_checkpoint` on rank 0 only, and all ranks meet at a barrier after it. An exception would
        leave the others waiting there. With `behind` a save returns before the file is written: a failure is reported
        at the next save or by `settle`.
        """
        self.failure, self._deferring, self._behind = None, True, behind
        try:
            yield
        finally:
            self._deferring = self._behind = False

    @property
    def has_failed(self) -> bool:
        """Whether a checkpoint could not be written and that has not been reported yet."""
        return self._writer.failure is not None

    def wait(self) -> None:
        """Return when nothing is left to write."""
        self._writer.wait()

    def settle(self) -> None:
        """Return when every checkpoint is on disk; a failure is raised, or stored under `deferring`."""
        with self._raising_or_keeping():
            self._writer.settle()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """As `write_checkpoint`; the folder is made for the first save into it, and not again if it is removed."""
        path = Path(path)
        with self._raising_or_keeping(), _as_save_error(path):
            if self._behind:
                self._writer.wait_for_room(path)
                self._writer.write(path, partial(self._write, snapshot(checkpoint), path))
            else:
                self._writer.settle()
                self._write(checkpoint, path)

    @override
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read tensors, to the CPU, and primitives; if the file carries a hash, its content must match."""
        if weights_only is False:
            raise ConfigError(
                "--weights_only=false would let a checkpoint run code", remedy="leave it out: no checkpoint needs it"
            )
        path = Path(path)
        self.settle()
        if path.is_file() and carries_hash(path):
            verify_checkpoint(path)
        return read_checkpoint(path, mmap=False)

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, or warn if that fails.

        It is removed only when everything saved before is on disk: until then it may be the only checkpoint.
        """
        self._writer.do(partial(_remove, Path(path)), Path(path))

    @override
    def teardown(self) -> None:
        """Return when nothing is left to write, however the run ends.

        A failure that was not reported is raised, or printed if another exception is being raised.
        """
        raised = sys.exception()
        try:
            self.settle()
        except CheckpointError as failure:
            if raised is None:
                raise
            print(printable(f"lit_cifar: {failure}", lines=True), file=sys.stderr, flush=True)

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        folder = path.parent
        if folder not in self._folders:
            make_folder(folder)
        if path.name == LAST:  # what belongs to the checkpoint is on the disk before it is
            for each in (*folder.parent.glob("*.csv"), folder.parent):
                sync(each)
            note_epoch(checkpoint, folder.parent)
        write_checkpoint(checkpoint, path)
        self._folders.add(folder)

    @contextmanager
    def _raising_or_keeping(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if not self._deferring:
                raise
            self.failure = error


class _Writer:
    """Runs jobs one after the other in a thread. After one has failed the following ones are skipped.

    The thread exists while there are jobs. The interpreter waits for it before it exits.
    """

    def __init__(self) -> None:
        self.failure: CheckpointError | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._unwritten: list[tuple[Path, Future[None]]] = []

    def wait_for_room(self, path: Path) -> None:
        """Return when at most one other file, and not `path`, is waiting to be written; raises if one has failed."""
        while len(self._unwritten) > 1 or any(path == other for other, _ in self._unwritten):
            self._unwritten.pop(0)[1].result()
        if self.failure is not None:
            self.settle()

    def write(self, path: Path, job: Callable[[], None]) -> None:
        """Let the thread run `job`, which writes `path`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=HELPER)
        self._unwritten.append((path, self._thread.submit(self._run, job, path)))

    def do(self, job: Callable[[], None], path: Path) -> None:
        """Run `job`, which concerns `path`, after all jobs before it; at once if there are none."""
        if self._thread is None:
            job()
        else:
            self._thread.submit(self._run, job, path)

    def wait(self) -> None:
        """Return when all jobs are done, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._unwritten.clear()

    def settle(self) -> None:
        """As `wait`; raises the error of a job that has failed, once."""
        self.wait()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _run(self, job: Callable[[], None], path: Path) -> None:
        if self.failure is None:
            try:
                with _as_save_error(path):
                    job()
            except CheckpointError as error:
                self.failure = error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        rank_zero_warn(f"{path} could not be removed: {error.strerror}")


@contextmanager
def _as_save_error(path: Path) -> Iterator[None]:
    """Turn any error of a save into a `SaveError`, which is reported to the other ranks: else they would wait."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise save_error(error, path, checkpoints=path.parent) from error
    except Exception as error:
        raise SaveError(
            f"{path} could not be saved: {type(error).__name__}: {error}\n{what_is_left(path.parent)}"[:500],
            remedy="put nothing but tensors and primitives into a checkpoint, in `on_save_checkpoint` and `state_dict`",
        ) from error


def digest(weights: Mapping[str, Tensor]) -> str:
    """The SHA-256 of parameters and buffers, in hexadecimal: of their names, dtypes, shapes and bytes by name."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def note_epoch(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """If `checkpoint` is of an epoch's end, write its line, in place of those of this epoch and of later ones.

    To be called before the checkpoint is written: a run that is killed in between repeats the epoch and its line.

    Raises:
        SaveError: The file cannot be written.
    """
    position = checkpoint.get(POSITION, {"epoch": 0})
    if not position["epoch"] or position["step"]:
        return
    path, epoch = folder / DIGESTS, position["epoch"] - 1
    try:
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        kept = [line for line in lines if (found := _DIGEST_LINE.fullmatch(line)) and int(found[1]) < epoch]
        with replacing(path) as file:
            file.write("\n".join([*kept, f"{digest(checkpoint['state_dict'])}  epoch {epoch}", ""]))
    except OSError as error:
        raise save_error(error, path, checkpoints=folder / "checkpoints") from error
