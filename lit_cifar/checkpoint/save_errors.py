"""What a run says when its folder cannot be written, and which checkpoints it then has."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lit_cifar.errors import SaveError

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
_DISK = (errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


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
