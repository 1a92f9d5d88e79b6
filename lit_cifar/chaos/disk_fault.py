"""A small disk to fill: a file system of its own in memory, or, without the right to mount one, a limit on files."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_FREE_BYTES = 2 << 20
"""What a filled disk has left: room for a line of a log, not for a checkpoint."""


@dataclass
class SmallDisk:
    """A folder that can be made to refuse the next checkpoint.

    Attributes:
        folder: Where the run writes.
        how: How it is filled, in words; None where it cannot be.
    """

    folder: Path
    how: str | None = None

    def fill(self, processes: list[psutil.Process]) -> None:
        """Leave no room for a checkpoint; `processes` are those that might write one."""
        raise NotImplementedError

    def free(self) -> None:
        """Make room again."""


class MountedDisk(SmallDisk):
    """A tmpfs of so many bytes, filled by a file."""

    def fill(self, processes: list[psutil.Process]) -> None:
        """Take all space but `_FREE_BYTES`."""
        with (self.folder / "filler").open("ab") as file:
            while (free := _free_bytes(self.folder) - _FREE_BYTES) > 0:
                try:
                    file.write(bytes(min(free, 1 << 22)))
                    file.flush()
                except OSError as error:  # a checkpoint was quicker
                    if error.errno != errno.ENOSPC:
                        raise
                    return

    def free(self) -> None:
        """Remove the filler."""
        (self.folder / "filler").unlink(missing_ok=True)


class LimitedDisk(SmallDisk):
    """RLIMIT_FSIZE of the running processes: a larger file fails while it is written. New processes are free of it."""

    def fill(self, processes: list[psutil.Process]) -> None:
        """Let none of `processes` write a file beyond `_FREE_BYTES`."""
        for process in processes:
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (_FREE_BYTES, hard))


@contextmanager
def small_disk(folder: Path, *, num_bytes: int) -> Iterator[SmallDisk]:
    """The best way to fill a disk that this machine and user offer.

    Args:
        folder: Exists, empty; the run goes into it.
        num_bytes: Size of the file system, if there can be one.
    """
    if _mount(folder, num_bytes):
        try:
            yield MountedDisk(folder, "a file system in memory (tmpfs), filled by a file")
        finally:
            _unmount(folder)
    elif hasattr(psutil, "RLIMIT_FSIZE"):
        yield LimitedDisk(folder, "a limit on the size of files (RLIMIT_FSIZE): no right to mount a file system")
    else:
        yield SmallDisk(folder)


def _mount(folder: Path, num_bytes: int) -> bool:
    return _succeeds("mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "lit_cifar-chaos", str(folder))


def _unmount(folder: Path) -> None:
    # Lazily if somebody is looking into it: it is gone from the tree at once, and from memory once they have left.
    if not _succeeds("umount", str(folder)):
        _succeeds("umount", "--lazy", str(folder))


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
