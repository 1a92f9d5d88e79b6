"""Fetching the official CIFAR-10 archive: checked before it is unpacked, and put in place only when complete."""

import hashlib
import http.client
import shlex
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import wrap_file

from lit_cifar.errors import DataError, one_line

TIMEOUT_S = 30.0  # without a byte from the server


@dataclass(frozen=True)
class Archive:
    """A compressed tar file on the web that holds one folder."""

    url: str
    md5: str  # its published hash, in hexadecimal
    folder: str  # name of the folder in it

    @property
    def file_name(self) -> str:
        return self.url.rpartition("/")[2]


# Address and hash as printed on https://www.cs.toronto.edu/~kriz/cifar.html for the binary version.
CIFAR10_BINARY = Archive(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    folder="cifar-10-batches-bin",
)


def install(archive: Archive, root: Path, *, download: bool) -> None:
    """Make `root/archive.folder`, from an archive that already lies in `root` or else from the web.

    The folder appears in one step, by renaming, so that an interrupted call leaves none rather than half of one.
    A downloaded archive is deleted once it is unpacked; one found in `root` stays.
    """
    present = root / archive.file_name
    if not present.exists() and not download:
        raise DataError(f"there is no CIFAR-10 in {root}, and --data.download=false", remedy=remedies(archive, root))
    with staging(root) as scratch:
        source = present
        if not present.exists():
            source = scratch / archive.file_name
            _fetch(archive, source, root)
        _check_hash(archive, source, root)
        _unpack(archive, source, scratch)
        put_in_place(scratch / archive.folder, root / archive.folder)


def remedies(archive: Archive, root: Path, *, tried: bool = False) -> str:
    """The three ways out when CIFAR-10 cannot be had, in three lines; `tried` says that a download has failed."""
    allow = "" if tried else "allow the download with --data.download=true, or "
    return (
        f"pass --data.root=FOLDER where FOLDER holds {archive.folder} or cifar-10-batches-py,\n"
        f"or {allow}put {archive.url} into {shlex.quote(str(root))} by hand,\n"
        "or use images drawn by code instead: --data.dataset=synthetic"
    )


@contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A hidden, temporary folder inside `root` (which is made if need be), removed at the end in any case."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".download-", dir=root))
    except OSError as error:
        raise DataError(
            f"--data.root={root} cannot be written to: {error.strerror}",
            remedy="pass a folder that can, --data.root=FOLDER, or one that already holds the data",
        ) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def put_in_place(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; if another process has made `target` meanwhile, that one stays."""
    try:
        folder.rename(target)
    except OSError as error:
        if not target.is_dir():  # whatever is there under this name has been put there whole, by this function
            raise DataError(
                f"{target} cannot be made: {error.strerror}", remedy="pass another folder: --data.root=FOLDER"
            ) from error


def _fetch(archive: Archive, target: Path, root: Path) -> None:
    request = Request(archive.url, headers={"User-Agent": "lit-cifar"})
    try:
        with urlopen(request, timeout=TIMEOUT_S) as response, target.open("wb") as file:
            size = int(response.headers.get("Content-Length", 0))
            description = f"Downloading {archive.file_name}"
            with wrap_file(response, size, description=description, console=Console(stderr=True)) as reader:
                shutil.copyfileobj(reader, file)
    except (OSError, http.client.HTTPException) as error:  # urllib's own errors are OSErrors
        if isinstance(error, HTTPError):
            error.close()  # it is the response too, with an open connection
        raise DataError(
            f"{archive.url} cannot be downloaded to {root}: {one_line(error)}",
            remedy=remedies(archive, root, tried=True),
        ) from error


def _check_hash(archive: Archive, path: Path, root: Path) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy="make it readable, or delete it") from error
    if found == archive.md5:
        return
    if path.parent == root:
        raise DataError(
            f"{path} is not the official archive: its md5 is {found}, not {archive.md5}",
            remedy=f"delete it (it may be half a download) and run again, or fetch {archive.url} anew",
        )
    raise DataError(
        f"what {archive.url} sent is not the official archive: its md5 is {found}, not {archive.md5}",
        remedy=remedies(archive, root, tried=True),
    )


def _unpack(archive: Archive, source: Path, scratch: Path) -> None:
    try:
        with tarfile.open(source) as tar:
            tar.extractall(scratch, filter="data")
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(
            f"{source.name} cannot be unpacked in {scratch.parent}: {one_line(error)}",
            remedy="make room on the disk, or pass another folder: --data.root=FOLDER",
        ) from error
    if not (scratch / archive.folder).is_dir():
        raise DataError(
            f"{source.name} holds no folder {archive.folder}", remedy=remedies(archive, scratch.parent, tried=True)
        )
