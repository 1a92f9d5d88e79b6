"""Checkpoint files that survive a kill at any moment, a full disk and damage.

A file carries the sha256 hash of its content, in the comment of the zip archive that `torch.save` writes: one rename
puts both in place, and `torch.load` reads the file like any other. The hash detects damage. It is no signature: every
file is still read as untrusted, with `weights_only=True`.
"""

import errno
import hashlib
import io
import os
import re
import shlex
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_cifar.checkpoint.format import check_is_file, holds_training, read_checkpoint
from lit_cifar.errors import CheckpointError, SaveError
from lit_cifar.internals import tree_map_only
from lit_cifar.reporting.files import sync

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
_TENSORS_ALONE = "put nothing but tensors and primitives into a checkpoint, in `on_save_checkpoint` and `state_dict`"
_DISK = (errno.EISDIR, errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
_LABEL = b"sha256="
_COMMENT_BYTES = len(_LABEL) + 2 * hashlib.sha256().digest_size
_CHUNK_BYTES = 1 << 22


def snapshot(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `checkpoint` with its tensors on the CPU, where later steps do not change them."""
    copied: dict[str, Any] = tree_map_only(Tensor, lambda each: each.detach().to("cpu", copy=True), dict(checkpoint))
    return copied


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Save to `path`, as a draft beside it that is synced, read back and compared, and only then renamed.

    When `last.ckpt` is replaced, the old file becomes `previous.ckpt` if a training can go on from it. At every moment
    there is a complete `last.ckpt`, or `previous.ckpt` where a file cannot have two names. Only one process at a time
    may write to a folder. The tensors must be on the CPU: see `snapshot`.

    Raises:
        SaveError: The file cannot be written and read back. Earlier files are unchanged and no draft is left.
    """
    draft = path.with_name(f"{path.name}.part")
    with saving(path):
        try:
            _write_synced(draft, _serialise(checkpoint))
            _read_back(draft, path)
            if path.name == LAST and newest_valid(path.parent)[0] == path:
                _keep(path, path.with_name(PREVIOUS))
            draft.replace(path)
            sync(path.parent)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def _keep(path: Path, name: Path) -> None:
    """Let a file have `name` beside its own, in place of what has it now; or alone, where it cannot have two."""
    draft = name.with_name(f"{name.name}.part")
    draft.unlink(missing_ok=True)  # of a process that was killed here
    with suppress(OSError):
        if not path.is_symlink():
            os.link(path, draft)
    (draft if draft.exists() else path).replace(name)
    draft.unlink(missing_ok=True)  # a rename does nothing where both are names of one file already


def read_checked(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a file of any program; if it carries a hash, its content must match, or a `CheckpointError` is raised."""
    verify_checkpoint(path, needs_hash=False)
    return read_checkpoint(path, mapped=mapped)


def verify_checkpoint(path: Path, *, needs_hash: bool = True) -> None:
    """Raise a `CheckpointError` if a file is missing, truncated, damaged, or carries no hash although it must."""
    check_is_file(path)
    try:
        expected = carried_hash(path)
        found = expected and content_hash(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if needs_hash and expected is None:
        problem = f"{path} carries no hash of its content: it is truncated, or not a checkpoint of this program"
        trusted = shlex.quote(f"--ckpt_path={path}")
        raise CheckpointError(problem, remedy=f"use another checkpoint; if you trust it, pass {trusted}")
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its content does not match the hash it carries")


def carried_hash(path: Path) -> str | None:
    """The hash of its content that a file carries; None for a truncated file and for one of another program."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _COMMENT_BYTES))
        match = re.fullmatch(_LABEL + rb"([0-9a-f]{64})", file.read())
    return match[1].decode() if match else None


def content_hash(path: Path) -> str:
    """The hash of all but the comment."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        num_bytes = file.seek(0, os.SEEK_END) - _COMMENT_BYTES
        file.seek(0)
        for start in range(0, num_bytes, _CHUNK_BYTES):
            digest.update(file.read(min(_CHUNK_BYTES, num_bytes - start)))
    return digest.hexdigest()


def best_of(run_folder: Path) -> Path:
    """The best checkpoint of a run, or its last one: without validation images none is the best."""
    folder = run_folder / "checkpoints"
    found = [path for name in (BEST, LAST) if (path := folder / name).exists()]
    if not found:
        remedy = "name the folder of a fit, or pass --ckpt_path"
        raise CheckpointError(f"{run_folder} is no run folder with a checkpoint", remedy=remedy)
    return found[0]


def newest_valid(folder: Path, *, whole: bool = True) -> tuple[Path | None, list[str]]:
    """The newest file of a run's `checkpoints/` from which a training can go on, if any; why newer ones were refused.

    Without `whole` a file is opened and not read, so that damage to its tensors is not found.
    """
    refused: list[str] = []
    for path in (folder / LAST, folder / PREVIOUS):
        if not os.path.lexists(path):
            continue
        try:
            if whole:
                verify_checkpoint(path)
            if holds_training(read_checkpoint(path, mapped=True)):
                return path, refused
            refused.append(f"{path} holds weights and no state of an optimizer, so that no training can go on from it")
        except CheckpointError as error:
            refused.append(error.problem)
    return None, refused


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


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise the memory would be read back


def _read_back(draft: Path, path: Path) -> None:
    try:
        verify_checkpoint(draft)
        read_checkpoint(draft)
    except CheckpointError as error:
        draft.stat()  # raises the real error if the folder was removed meanwhile
        problem = f"{path} could not be saved: what was written cannot be read back\n{error.problem}"
        raise SaveError(problem, remedy=f"check the disk, or {_TENSORS_ALONE}") from error


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
        raise SaveError(problem[:500], remedy=_TENSORS_ALONE) from error


def save_error(error: OSError, path: Path, *, checkpoints: Path) -> SaveError:
    """The error that `path` could not be written, with the checkpoints that exist and what to do."""
    problem = f"{path} could not be saved: {error.strerror or error}\n{what_is_left(checkpoints)}"
    remedy = "free some space or make the folder writable, then resume with the same command and --resume=auto"
    return SaveError(problem, remedy=remedy)


def what_is_left(folder: Path) -> str:
    with suppress(OSError):
        names = [name for name in (LAST, PREVIOUS, BEST) if (folder / name).exists()]
        if names:
            return f"earlier checkpoints are unchanged: {', '.join(names)}"
    return f"there is no checkpoint in {folder}"
