"""A lock on a run folder: two runs that write to the same one would both fail, or write their metrics twice."""

import errno
import fcntl
import os
import shlex
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.errors import ConfigError

LOCK = ".lock"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Held by rank 0, the only one that writes to the folder, from before it looks for a checkpoint until it ends.

    This relies on `flock`. The kernel releases the lock when the process ends, also by SIGKILL, and programs that the
    process starts do not inherit it. On NFS Linux turns it into a lock of the server. Other machines then see it, and
    the server releases it when the holder's machine has been silent for a while; some wait until that machine is back.
    On a file system without locks the run only warns. Not covered: processes of `ddp_spawn` end ten seconds after their
    parent if that is killed by SIGKILL.
    """

    def __init__(self) -> None:
        self._path = Path()
        self._descriptor: int | None = None

    def take(self, folder: Path) -> None:
        """Lock `folder`, unless that was done.

        Raises:
            ConfigError: Another process holds the lock.
            OSError: The folder cannot be written.
        """
        if self._descriptor is None:
            self._path = folder / LOCK
            self._descriptor = _locked(self._path)
            text = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, text.encode())

    def release(self) -> None:
        """Remove the file, then the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):  # the folder is gone
                if _is_at(self._path, descriptor):
                    self._path.unlink()
            os.close(descriptor)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _locked(path: Path) -> int:
    """A descriptor of the file at `path`, locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, path)
            if _is_at(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # of a file that the last holder has just removed


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace")
        known = "".join(filter(str.isprintable, holder)) or "another process"
        raise ConfigError(
            f"the run folder {path.parent} is in use by {known}",
            remedy=f"wait for its end, or end it; if that machine is gone: rm {shlex.quote(str(path))}",
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        rank_zero_warn(f"the file system of {path.parent} has no locks: let no other process write to this folder")


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
