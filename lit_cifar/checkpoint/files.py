"""Checkpoint files that survive a kill at any moment, a full disk and damage.

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
import secrets
import shlex
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lit_cifar.checkpoint.format import read_checkpoint, read_own_checkpoint
from lit_cifar.errors import CheckpointError, SaveError
from lit_cifar.reporting.files import sync

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
_DISK = (errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_LABEL = b"sha256="
_COMMENT_BYTES = len(_LABEL) + 2 * hashlib.sha256().digest_size
_END_RECORD, _END_RECORD_BYTES = b"PK\x05\x06", 22  # the archive's last record; its last two bytes count the comment's
_CHUNK_BYTES = 1 << 22
_SPARE_BYTES = 1 << 20  # beside the file itself: directory entries, and the run's log files
_DRAFT = ".part"


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Save to `path`, which at every moment is either the old file or the complete new one.

    The content is written to a draft beside `path`, synced, read back and compared, and only then renamed. When
    `last.ckpt` is replaced, the old file becomes `previous.ckpt` if its hash is right. Drafts of killed runs are
    removed. Only one process at a time may write to a folder.

    Raises:
        SaveError: There is no space, no permission or no folder, the disk is faulty, or the content is more than
            tensors and primitives. Earlier files are unchanged and no draft is left.
    """
    content = _serialise(checkpoint)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_DRAFT}")
    try:
        _remove_drafts(path.parent)
        _check_free_space(path.parent, len(content))
        _write_synced(draft, content)
        _read_back(draft, path)
        _put_in_place(draft, path)
    except OSError as error:
        raise save_error(error, path, checkpoints=path.parent) from error
    finally:
        with suppress(OSError):
            _remove_drafts(path.parent)


def snapshot(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A copy on the CPU, which later steps do not change; tensors that share memory share it in the copy too."""
    copied: dict[str, Any] = _on_cpu(dict(checkpoint), {}, memo={})
    return copied


def verify_checkpoint(path: Path) -> None:
    """Raise a `CheckpointError` if a file is missing, truncated, damaged, or carries no hash."""
    other = "use another of the run's checkpoints"
    try:
        found, expected = _hashes(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", remedy=other) from error
    if expected is None and _is_whole_without_comment(path):
        raise CheckpointError(
            f"{path} carries no hash of its content: this release has not written it",
            remedy="if you trust it, pass " + shlex.quote(f"--ckpt_path={path}"),
        )
    if expected is None:
        raise CheckpointError(f"{path} is truncated, or not a checkpoint", remedy=other)
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its content does not match the hash it carries", remedy=other)


def carries_hash(path: Path) -> bool:
    """Whether a file carries a hash of its content; a truncated file does not."""
    return _hashes(path, compute=False)[1] is not None


def content_digest(path: Path) -> str:
    """The hash of a checkpoint's content that it carries; of another's file that of all its bytes."""
    carried = _hashes(path, compute=False)[1]
    if carried is not None:
        return carried
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """`last.ckpt`, else `previous.ckpt` of a run's `checkpoints/`, else None; and why newer ones were refused, a line
    each.
    """
    refused = []
    for path in (folder / LAST, folder / PREVIOUS):
        if not os.path.lexists(path):
            continue
        try:
            verify_checkpoint(path)
            read_checkpoint(path)
        except CheckpointError as error:
            refused.append(error.problem)
        else:
            return path, refused
    return None, refused


def _serialise(checkpoint: Mapping[str, Any]) -> bytes:
    """The bytes of the file, in memory: what is read back is compared with what should have been written."""
    buffer = io.BytesIO()
    torch.save(_on_cpu(dict(checkpoint), {}), buffer)
    buffer.seek(-_END_RECORD_BYTES, os.SEEK_END)
    if buffer.read(len(_END_RECORD)) != _END_RECORD:
        raise RuntimeError("torch.save has not written a zip archive that ends without a comment")
    buffer.seek(-2, os.SEEK_END)
    buffer.write(struct.pack("<H", _COMMENT_BYTES))
    # Not getbuffer(): Python 3.12.1 was seen to crash when it collected that. No variable may refer to the content: the
    # next write would then copy all of it, while other threads wait.
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    buffer.write(_LABEL + digest.encode())
    return buffer.getvalue()


def _on_cpu(content: Any, moved: dict[int, UntypedStorage], *, memo: dict[int, Any] | None = None) -> Any:
    """`content` with its tensors on the CPU; torch would save each tensor's device and need it for loading.

    Tensors that share memory share it in the result too: `moved` has the storages moved so far, by their former
    address. Those on the CPU are copied only with a `memo`, that of `deepcopy`.
    """
    if isinstance(content, Tensor) and content.device.type != "cpu":
        return _tensor_on_cpu(content, moved)
    if isinstance(content, dict):
        moved_dict = copy(content)  # of its own class
        moved_dict.update({key: _on_cpu(value, moved, memo=memo) for key, value in content.items()})
        return moved_dict
    if type(content) in (list, tuple):
        return type(content)(_on_cpu(value, moved, memo=memo) for value in content)
    if memo is None:
        return content
    return deepcopy(content.detach() if isinstance(content, Tensor) else content, memo)


def _tensor_on_cpu(tensor: Tensor, moved: dict[int, UntypedStorage]) -> Tensor:
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if address not in moved:
        moved[address] = storage.cpu()  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=tensor.dtype).set_(
        moved[address], tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _hashes(path: Path, *, compute: bool = True) -> tuple[str | None, str | None]:
    """The content's hash, None unless computed, and the one that the file carries, None if it carries none."""
    with path.open("rb") as file:
        num_bytes = max(0, file.seek(0, os.SEEK_END) - _COMMENT_BYTES)
        file.seek(num_bytes)
        match = re.fullmatch(_LABEL + rb"([0-9a-f]{64})", file.read())
        carried = match[1].decode() if match else None
        if carried is None or not compute:
            return None, carried
        digest = hashlib.sha256()
        file.seek(0)
        while num_bytes:
            chunk = file.read(min(num_bytes, _CHUNK_BYTES))
            if not chunk:
                break  # the file is being truncated
            digest.update(chunk)
            num_bytes -= len(chunk)
        return digest.hexdigest(), carried


def _is_whole_without_comment(path: Path) -> bool:
    """Whether a file ends as `torch.save` ends it; a truncated file of ours ends elsewhere or announces a comment."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_RECORD_BYTES))
        end = file.read()
    return end.startswith(_END_RECORD) and end.endswith(b"\0\0")


def _remove_drafts(folder: Path) -> None:
    for draft in folder.glob(f"*.ckpt.*{_DRAFT}"):
        draft.unlink(missing_ok=True)


def _check_free_space(folder: Path, num_bytes: int) -> None:
    usage = shutil.disk_usage(folder)
    needed = num_bytes + _SPARE_BYTES
    if usage.total and usage.free < needed:  # a total of 0: the file system does not say
        have = f"{needed / 1e6:.1f} MB needed, {usage.free / 1e6:.1f} MB free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({have})")


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        for start in range(0, len(content), _CHUNK_BYTES):
            file.write(content[start : start + _CHUNK_BYTES])
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # or reading back would show the memory, not the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_back(draft: Path, path: Path) -> None:
    try:
        verify_checkpoint(draft)
    except CheckpointError as error:
        draft.stat()  # raises the real error if the folder was removed meanwhile
        raise SaveError(
            f"{path} could not be saved: what was written reads back differently", remedy="check the disk"
        ) from error
    try:
        read_own_checkpoint(draft)
    except CheckpointError as error:
        draft.stat()
        raise SaveError(
            f"{path} could not be saved: torch cannot load what was written\n{error.problem}",
            remedy="put nothing but tensors and primitives into a checkpoint, in `on_save_checkpoint` and `state_dict`",
        ) from error


def _put_in_place(draft: Path, path: Path) -> None:
    kept = _keep(path, draft) if path.name == LAST else None
    draft.replace(path)
    if kept is not None:
        kept.replace(path.with_name(PREVIOUS))
    sync(path.parent)


def _keep(path: Path, draft: Path) -> Path | None:
    """A second name for the file at `path`, which is about to be replaced; None if its hash is wrong."""
    try:
        verify_checkpoint(path)
    except CheckpointError:
        return None
    kept = draft.with_name(f"{draft.name}.kept{_DRAFT}")
    try:
        kept.hardlink_to(path)
    except OSError:  # a file system without hard links: for a moment only previous.ckpt exists
        path.replace(path.with_name(PREVIOUS))
        return None
    return kept


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


def save_error(error: OSError, path: Path, *, checkpoints: Path) -> SaveError:
    """The error that `path` could not be written, with the checkpoints that exist and what to do."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ESTALE):
        reason, remedy = f"its folder is gone ({reason})", "bring it back"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        remedy = "make the folder writable"
    else:
        remedy = "check the disk"
    return SaveError(
        f"{path} could not be saved: {reason}\n{what_is_left(checkpoints)}",
        remedy=f"{remedy}, then resume with the same command and --resume=auto",
    )


def what_is_left(folder: Path) -> str:
    """The checkpoints in `folder`, as a clause of an error message."""
    with suppress(OSError):
        names = [name for name in (LAST, PREVIOUS, BEST) if (folder / name).exists()]
        if names:
            return f"earlier checkpoints are unchanged: {', '.join(names)}"
    return f"there is no checkpoint in {folder}"
