"""Checkpoint files that survive a kill at any moment, a full disk and damage."""

import errno
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_cifar.checkpoint.format import holds_training, read_checkpoint
from lit_cifar.errors import CheckpointError, SaveError
from lit_cifar.internals import tree_map_only
from lit_cifar.reporting.files import sync

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
_TENSORS_ALONE = "put nothing but tensors and primitives into a checkpoint, in `on_save_checkpoint` and `state_dict`"
_DISK = {errno.EACCES, errno.EISDIR, errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DISK |= {errno.EROFS, errno.EIO, errno.ESTALE}


def snapshot(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `checkpoint` with its tensors on the CPU, where later steps do not change them."""
    kinds = (Tensor, set, bytearray, dict)  # of dictionaries only a Counter is a leaf of the tree
    copied: dict[str, Any] = tree_map_only(
        kinds, lambda it: it.detach().to("cpu", copy=True) if isinstance(it, Tensor) else it.copy(), dict(checkpoint)
    )
    return copied


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Save to `path`, as a draft beside it that is synced, read back and compared, and only then renamed.

    When `last.ckpt` is replaced, the old file becomes `previous.ckpt` if a training can go on from it: between the two
    renames that is the newest one. Only one process at a time may write to a folder. Tensors must be on the CPU.

    Raises:
        SaveError: The file cannot be written and read back. Earlier files are unchanged and no draft is left.
    """
    draft = path.with_name(f"{path.name}.part")
    with saving(path):
        try:
            buffer = io.BytesIO()  # torch itself would not say which error the disk has
            torch.save(dict(checkpoint), buffer)
            _write_synced(draft, buffer.getvalue())
            _read_back(draft, path)
            if path.name == LAST and newest_valid(path.parent)[0] == path:
                path.replace(path.with_name(PREVIOUS))
            draft.replace(path)
            sync(path.parent)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def best_of(run_folder: Path) -> Path:
    """The best checkpoint of a run, or its last one: without validation images none is the best."""
    folder = run_folder / "checkpoints"
    found = [path for name in (BEST, LAST) if os.path.lexists(path := folder / name)]
    if not found:
        remedy = "name the folder of a fit, or pass --ckpt_path"
        raise CheckpointError(f"{run_folder} is no run folder with a checkpoint", remedy=remedy)
    return found[0]


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest file of a run from which a training can go on, if there is one; and why newer ones were refused."""
    refused: list[str] = []
    for path in (folder / LAST, folder / PREVIOUS):
        if not os.path.lexists(path):
            continue
        try:
            if holds_training(read_checkpoint(path, mapped=True)):
                return path, refused
            refused.append(f"{path} holds weights and no state of an optimizer, so that no training can go on from it")
        except CheckpointError as error:
            refused.append(error.problem)
    return None, refused


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise the memory would be read back


def _read_back(draft: Path, path: Path) -> None:
    try:
        read_checkpoint(draft, mapped=True)
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
        if names := [name for name in (LAST, PREVIOUS, BEST) if (folder / name).exists()]:
            return f"earlier checkpoints are unchanged: {', '.join(names)}"
    return f"there is no checkpoint in {folder}"
