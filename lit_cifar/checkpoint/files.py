"""Checkpoint files that survive a kill at any moment, a full disk and damage, and the plugin that writes them.

A file carries the sha256 hash of its content, in the comment of the zip archive that `torch.save` writes. So there is
no second file that could belong to another save. One rename puts content and hash in place together, and `torch.load`
reads the file like any other. The hash detects damage. It is no signature: every file is still read as untrusted, with
`weights_only=True`.
"""

import errno
import hashlib
import io
import os
import re
import shlex
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lit_cifar.checkpoint.format import POSITION, holds_training, read_checkpoint
from lit_cifar.checks.watchdog import HELPER
from lit_cifar.errors import CheckpointError, ConfigError, SaveError, printable
from lit_cifar.internals import tree_flatten, tree_map_only, tree_unflatten
from lit_cifar.reporting.files import make_folder, replacing, sync

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
INDEX = "index.ckpt"  # a file of a checkpoint in parts, which is a folder, see `sharded.py`
DIGESTS = "weights.sha256"  # a file of the run folder: a line for each epoch, to compare two runs by eye
_DIGEST_LINE = re.compile(r"[0-9a-f]{64}  epoch (\d+)")
_DISK = (errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_LABEL = b"sha256="
_COMMENT_BYTES = len(_LABEL) + 2 * hashlib.sha256().digest_size
_CHUNK_BYTES = 1 << 22
_LARGE_BYTES = 1 << 20  # a tensor of this size or more is sent alone
TENSORS_ALONE = "put nothing but tensors and primitives into a checkpoint, in `on_save_checkpoint` and `state_dict`"


def snapshot(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `content` with its tensors on the CPU, where later steps do not change them."""
    copied: dict[str, Any] = tree_map_only(Tensor, lambda each: each.detach().to("cpu", copy=True), dict(checkpoint))
    return copied


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Save to `path`; at every moment it, or `previous.ckpt` beside `last.ckpt`, is a complete file.

    The content is written to a draft beside `path`, synced, read back and compared, and only then renamed. When
    `last.ckpt` is replaced, the old file becomes `previous.ckpt` if a training can go on from it. Only one process at a
    time may write to a folder. The tensors must be on the CPU: see `snapshot`.

    Raises:
        SaveError: There is no space, no permission or no folder, the disk is faulty, or the content is more than
            tensors and primitives. Earlier files are unchanged and no draft is left.
    """
    with saving(path):
        write_file(checkpoint, path)


def write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write like `write_checkpoint`, but raise the errors as they are."""
    draft = path.with_name(f"{path.name}.part")
    try:
        _write_synced(draft, _serialise(checkpoint))
        _read_back(draft, path)
        put_in_place(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def put_in_place(draft: Path, path: Path) -> None:
    """Rename the file or folder `draft` to `path`. A resumable `last.ckpt` there becomes `previous.ckpt`."""
    if path.name == LAST and _is_resumable(path):
        previous = path.with_name(PREVIOUS)
        if path.is_dir() or previous.is_dir():  # a file cannot replace a folder, nor a folder a file
            remove(previous)
        path.replace(previous)
    elif path.is_dir() or draft.is_dir():
        remove(path)
    draft.replace(path)
    sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def index_of(path: Path) -> Path:
    """The index of a checkpoint in parts; `path` for one that is a file."""
    return path / INDEX if path.is_dir() else path


def read_whole(path: Path) -> dict[str, Any]:
    """Verify and read a checkpoint. Raise a `CheckpointError` if its content is not what was written."""
    if not path.is_dir():  # the files of a folder are verified one by one
        verify_checkpoint(path)
    return read_checkpoint(path)


def read_by_first(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `read` in the first process, and return its result or raise its `CheckpointError` in all.

    Every process must call this. Large tensors are sent one by one.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read()
    is_first, content = dist.get_rank() == 0, cast(Any, None)
    if is_first:
        try:
            content = read()
        except CheckpointError as error:
            content = error
    leaves, structure = tree_flatten(content)
    small = [not isinstance(leaf, Tensor) or leaf.nbytes < _LARGE_BYTES for leaf in leaves]
    sent = [([[leaf] if at_once else None for leaf, at_once in zip(leaves, small, strict=True)], structure)]
    dist.broadcast_object_list(sent)
    received: list[Any] = []
    for index, leaf in enumerate(sent[0][0]):
        tensor = [leaves[index] if is_first else None]
        if leaf is None:
            dist.broadcast_object_list(tensor)
        received += leaf or tensor
    content = tree_unflatten(received, sent[0][1])
    if isinstance(content, CheckpointError):
        raise content
    return dict(content)


def verify_checkpoint(path: Path) -> None:
    """Raise a `CheckpointError` if a file is missing, truncated, damaged, or carries no hash."""
    other = "use another checkpoint of the run"
    try:
        expected = carried_hash(path)
        found = content_hash(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", remedy=other) from error
    if expected is None:
        raise CheckpointError(
            f"{path} carries no hash of its content: it is truncated, or not a checkpoint of this program",
            remedy=f"{other}; if you trust it, pass " + shlex.quote(f"--ckpt_path={path}"),
        )
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its content does not match the hash it carries", remedy=other)


def carried_hash(path: Path) -> str | None:
    """The hash of its content that a file carries; None for a truncated file and for one of another program."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _COMMENT_BYTES))
        match = re.fullmatch(_LABEL + rb"([0-9a-f]{64})", file.read())
    return match[1].decode() if match else None


def best_of(run_folder: Path) -> Path:
    """The best checkpoint of a run, or its last one: without validation images none is the best."""
    found = [path for name in (BEST, LAST) if (path := run_folder / "checkpoints" / name).exists()]
    if not found:
        raise CheckpointError(
            f"{run_folder} is no run folder with a checkpoint", remedy="name the folder of a fit, or pass --ckpt_path"
        )
    return found[0]


def newest_valid(folder: Path, *, whole: bool = True) -> tuple[Path | None, list[str]]:
    """`last.ckpt`, else `previous.ckpt` of a run's `checkpoints/`, else None; and why newer ones were refused, a line
    each.

    Without `whole` a file is opened and not read, so that damage to its tensors is not found. Damage to a checkpoint in
    parts is found when they are read; a part that is missing or of a different save is found here.
    """
    refused = []
    for path in (folder / LAST, folder / PREVIOUS):
        if not os.path.lexists(path):
            continue
        try:
            _check_resumable(path, whole=whole)
        except CheckpointError as error:
            refused.append(error.problem)
        else:
            return path, refused
    return None, refused


def _check_resumable(path: Path, *, whole: bool = True) -> None:
    """Raise a `CheckpointError` if a training cannot go on from `path`."""
    if whole:
        verify_checkpoint(index_of(path))
    from lit_cifar.checkpoint.sharded import check_parts  # that file imports this one

    content = read_checkpoint(index_of(path), mapped=True)
    check_parts(content, path)
    if not holds_training(content):
        raise CheckpointError(
            f"{path} holds weights and no state of an optimizer, so that no training can go on from it",
            remedy="start a new one: " + shlex.quote(f"--ckpt_path={path}"),
        )


def _serialise(checkpoint: Mapping[str, Any]) -> bytes:
    """The bytes of the file, in memory, to compare with those that are read back."""
    buffer = io.BytesIO()
    torch.save(dict(checkpoint), buffer)
    buffer.seek(-2, os.SEEK_END)  # the last two bytes of an archive without a comment say that it has 0 bytes
    buffer.write(struct.pack("<H", _COMMENT_BYTES))
    # getbuffer() was seen to crash Python 3.12.1 when it was collected. No variable may refer to the content: the next
    # write would then copy all of it, while other threads wait.
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    buffer.write(_LABEL + digest.encode())
    return buffer.getvalue()


def content_hash(path: Path) -> str:
    """The hash of all but the comment."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        num_bytes = file.seek(0, os.SEEK_END) - _COMMENT_BYTES
        file.seek(0)
        for start in range(0, num_bytes, _CHUNK_BYTES):
            digest.update(file.read(min(_CHUNK_BYTES, num_bytes - start)))
    return digest.hexdigest()


def _is_resumable(path: Path) -> bool:
    try:
        _check_resumable(path)
    except CheckpointError:
        return False
    return True


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise the memory would be read back


def _read_back(draft: Path, path: Path) -> None:
    try:
        read_whole(draft)
    except CheckpointError as error:
        draft.stat()  # raises the real error if the folder was removed meanwhile
        raise SaveError(
            f"{path} could not be saved: what was written cannot be read back\n{error.problem}",
            remedy=f"check the disk, or {TENSORS_ALONE}",
        ) from error


@contextmanager
def reporting_disk(folder: Path | None) -> Iterator[None]:
    """Turn errors of the disk below the run folder into a short `SaveError`: the loggers write in many places."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename or folder or ""))
        if folder is None or error.errno not in _DISK or not path.absolute().is_relative_to(folder.absolute()):
            raise
        raise save_error(error, path, checkpoints=folder / "checkpoints") from error


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn every error into a `SaveError` that `path` could not be saved: other ranks may wait for this one."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise save_error(error, path, checkpoints=path.parent) from error
    except Exception as error:
        problem = f"{path} could not be saved: {type(error).__name__}: {error}\n{what_is_left(path.parent)}"
        raise SaveError(problem[:500], remedy=TENSORS_ALONE) from error


def save_error(error: OSError, path: Path, *, checkpoints: Path) -> SaveError:
    """The error that `path` could not be written, with the checkpoints that exist and what to do."""
    return SaveError(
        f"{path} could not be saved: {error.strerror or error}\n{what_is_left(checkpoints)}",
        remedy="free some space or make the folder writable, then resume with the same command and --resume=auto",
    )


def what_is_left(folder: Path) -> str:
    """The checkpoints in `folder`, as a clause of an error message."""
    with suppress(OSError):
        names = [name for name in (LAST, PREVIOUS, BEST) if (folder / name).exists()]
        if names:
            return f"earlier checkpoints are unchanged: {', '.join(names)}"
    return f"there is no checkpoint in {folder}"


class CheckpointFiles(CheckpointIO):
    """Writes files with `write_checkpoint`, and reads tensors and primitives only.

    Pass it to the Trainer: `plugins=[CheckpointFiles()]`. Lightning's own `TorchCheckpointIO` continues silently if it
    has no permission to write, and leaves `weights_only` to an environment variable.

    What is saved is copied at once and written by a thread. A save waits while its file is still being written, so
    there is at most one copy for each name. Lightning's `AsyncCheckpointIO` keeps any number of copies, cannot say when
    a file is complete, and raises errors on rank 0 only.

    Attributes:
        behind: Whether a save returns before its file is written, and raises nothing.
        quiet: Whether a save that waits for its file raises nothing either. See `failing_together`.
        failure: Failure of a save that nobody has reported yet. While there is one, nothing more is written.
    """

    def __init__(self) -> None:
        self.behind = self.quiet = False
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

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write like `write_checkpoint`, and make the folder for the first save into it, but not if it was removed."""
        path = Path(path)
        if path in self._unwritten:
            self._unwritten[path].result()
        copied = snapshot(checkpoint)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=HELPER)
        self._unwritten[path] = self._thread.submit(self._attempt, path, partial(self._write, copied, path))
        if self.quiet and not self.behind:
            self.wait()
        elif not self.behind:
            self.settle()

    @override
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read tensors, to the CPU, and primitives; if the file carries a hash, its content must match.

        Each process must call this; the first one reads its file for all.
        """
        if weights_only is False:
            raise ConfigError(
                "--weights_only=false would let a checkpoint run code", remedy="leave it out: no checkpoint needs it"
            )
        path = Path(path)
        self.settle()
        return read_by_first(
            lambda: read_whole(path) if path.is_file() and carried_hash(path) else read_checkpoint(path)
        )

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, or warn if that fails.

        It is removed only when everything saved before is on disk: until then it may be the only checkpoint.
        """
        if self._thread is None:
            _remove(Path(path))
        else:
            self._thread.submit(self._attempt, Path(path), partial(_remove, Path(path)))

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

    def _attempt(self, path: Path, job: Callable[[], None]) -> None:
        """Do `job`, which concerns `path`, unless an earlier save has failed."""
        if self.failure is not None:
            return
        try:
            with saving(path):
                job()
        except CheckpointError as error:
            self.failure = error

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        folder = path.parent
        if folder not in self._folders:
            make_folder(folder)
        if path.name == LAST:
            sync_tables(folder.parent)
            note_epoch(checkpoint, folder.parent)
        write_checkpoint(checkpoint, path)
        self._folders.add(folder)


def sync_tables(folder: Path) -> None:
    """Put the tables of the run folder, which belong to a checkpoint, onto the disk before the checkpoint."""
    for each in (*folder.glob("*.csv"), folder):
        sync(each)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        rank_zero_warn(f"{path} could not be removed: {error.strerror}")


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
            file.write("\n".join([*kept, f"{weights_digest(checkpoint['state_dict'])}  epoch {epoch}", ""]))
    except OSError as error:
        raise save_error(error, path, checkpoints=folder / "checkpoints") from error
