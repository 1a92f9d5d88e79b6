"""Putting a downloaded data set in place only when it is complete, and what to do about a damaged one."""

import http.client
import shlex
import shutil
import socket
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError

from lit_cifar.errors import DataError, one_line

TIMEOUT_S = 30.0  # longest wait for a byte from the server
SYNTHETIC = "or use images drawn by code instead: --data.dataset=synthetic"


@contextmanager
def installing(target: Path, title: str, *, remedy: str) -> Iterator[Path]:
    """Yield a hidden, temporary folder; what is made in it under the name of `target` is then put at `target`.

    That is done by renaming: an interrupted call leaves nothing. A `target` that another process has made meanwhile
    stays. What goes wrong with network, disk or archive of the data set called `title` is a `DataError` with `remedy`.
    """
    root = target.parent
    try:
        made = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".download-", dir=root))
    except OSError as error:
        problem = f"--data.root={root} cannot be written to: {error.strerror}"
        raise DataError(problem, remedy="pass a folder that can, or one that already holds the data") from error
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)  # torchvision, which downloads, has none
    try:
        yield scratch
        if not target.is_dir():
            (scratch / target.name).rename(target)
    except (OSError, RuntimeError, http.client.HTTPException, tarfile.TarError, EOFError, zlib.error) as error:
        if isinstance(error, HTTPError):
            error.close()  # the error is also the response, with an open connection
        if not target.is_dir():
            raise DataError(f"{title} cannot be put into {root}: {one_line(error)}", remedy=remedy) from error
    finally:
        socket.setdefaulttimeout(before)
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # the data set is in them, or what another process has put there
            for folder in made:
                folder.rmdir()


def replacing(folder: Path) -> str:
    """The remedies where the data set in `folder` is damaged."""
    moved = shlex.quote(str(folder))
    return f"put an undamaged copy in its place, or move {moved} away and pass --data.download=true,\n{SYNTHETIC}"
