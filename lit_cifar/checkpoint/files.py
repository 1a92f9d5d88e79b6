"""The plugin that reads and writes the checkpoints of a run."""

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lit_cifar.checkpoint.atomic import LAST, saving, snapshot, write_checkpoint
from lit_cifar.checkpoint.format import POSITION, read_checkpoint
from lit_cifar.errors import CheckpointError, ConfigError, printable
from lit_cifar.reporting.files import make_folder, replacing, sync

DIGESTS = "weights.sha256"  # a file of the run folder: a line for each saved epoch, to compare two runs by eye
_DIGEST_LINE = re.compile(r"[0-9a-f]{64}  epoch (\d+)")


class CheckpointFiles(CheckpointIO):
    """Writes files with `write_checkpoint`, and reads tensors and primitives only.

    Pass it to the Trainer: `plugins=[CheckpointFiles()]`. Lightning's own goes on silently without permission to write.
    What is saved is copied at once and written by a thread, as by `AsyncCheckpointIO`. But a save waits while its file
    is still being written, so that there is at most one copy for each name.
    """

    def __init__(self) -> None:
        self.behind = False  # whether a save returns before its file is written, and raises nothing
        # Failure of a save that nobody has reported yet. While there is one, nothing more is written.
        self.failure: CheckpointError | None = None
        self._folders: set[Path] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._unwritten: dict[Path, Future[None]] = {}

    def wait(self) -> None:
        """Return when nothing is left to write, and end the thread, for which the interpreter too waits."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._unwritten.clear()

    def settle(self) -> None:
        """Return when every checkpoint is on disk, or raise why one is not."""
        self.wait()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write like `write_checkpoint`, and make the folder for the first save into it, but not if it was removed."""
        path = Path(path)
        if path in self._unwritten:
            self._unwritten[path].result()
        copied = snapshot(checkpoint)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._unwritten[path] = self._thread.submit(self._write, copied, path)
        if not self.behind:
            self.settle()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file like `read_checkpoint`. Each process must call this; the first one reads its file for all."""
        if weights_only is False:
            raise ConfigError("--weights_only=false would let a checkpoint run code", remedy="leave it out")
        self.settle()
        found: list[Any] = [None]
        are_several = dist.is_initialized() and dist.get_world_size() > 1
        if not are_several or dist.get_rank() == 0:
            try:
                found = [read_checkpoint(Path(path))]
            except CheckpointError as error:
                found = [error]
        if are_several:
            dist.broadcast_object_list(found)
        if isinstance(found[0], CheckpointError):
            raise found[0]
        return dict(found[0])

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file when all that was saved before is on disk, until when it may be the only one; or warn."""
        self.settle()
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            rank_zero_warn(f"{path} could not be removed: {error.strerror}")

    @override
    def teardown(self) -> None:
        """As `settle`, however the run ends; if another exception is being raised, a failure is printed."""
        raised = sys.exception()
        try:
            self.settle()
        except CheckpointError as failure:
            if raised is None:
                raise
            print(printable(f"lit_cifar: {failure}", lines=True), file=sys.stderr, flush=True)

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write a file, unless an earlier save has failed."""
        if self.failure is not None:
            return
        folder = path.parent
        try:
            with saving(path):
                if folder not in self._folders:
                    make_folder(folder)
                if path.name == LAST and folder.name == "checkpoints":
                    for table in (*folder.parent.glob("*.csv"), folder.parent):  # they belong to it
                        sync(table)
                    note_epoch(checkpoint, folder.parent)
                write_checkpoint(checkpoint, path)
            self._folders.add(folder)
        except CheckpointError as error:
            self.failure = error


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the names, dtypes, shapes and bytes of parameters and buffers, in hexadecimal, sorted by name."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def note_epoch(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """Write the line of a `checkpoint` of an epoch's end, in place of the lines of this and later epochs.

    Call this before the checkpoint is written: a run that is killed in between repeats the epoch and its line.
    """
    position = checkpoint.get(POSITION, {"epoch": 0})
    if not position["epoch"] or position["step"]:
        return
    path, epoch = folder / DIGESTS, position["epoch"] - 1
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    kept = [line for line in lines if (found := _DIGEST_LINE.fullmatch(line)) and int(found[1]) < epoch]
    with replacing(path) as file:
        file.write("\n".join([*kept, f"{weights_digest(checkpoint['state_dict'])}  epoch {epoch}", ""]))
