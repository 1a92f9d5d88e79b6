"""Pictures decoded once: a file of uint8 pixels for each split, which every process of a machine maps and none copies.

The file holds the pixels of every picture, and behind them eight bytes for each: the beginning of their SHA-256, or a
mark that the picture cannot be read. It is written as `.part`, synced, and renamed when it is whole. After a kill,
pixels that agree with their hash are kept. The file's name is a digest of names, sizes and times of the pictures: a
changed folder, size of the images, Pillow or `FORMAT` gives a new file, and the old one is deleted.
"""

import fcntl
import mmap
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from lit_cifar.data.images import ImageSet
from lit_cifar.errors import DataError

FORMAT = 3  # version of the file's content; it changes when `read_image` makes different pixels
UNREADABLE = 2**64 - 1  # stands in place of a hash
_CHUNK = 64  # pictures that a worker decodes at a time
HASH = np.dtype("<u8")


@dataclass(frozen=True)
class MappedImages(ImageSet):
    """Images in a file that is mapped into memory. Those of a batch are copied, and their hashes compared."""

    file: mmap.mmap  # begins with `images`
    rows: Tensor  # int64, (N,): positions in `images`, which are all of the file
    hashes: npt.NDArray[np.uint64]  # hashes of all images of the file
    checked: Tensor  # bool: whether this process has compared an image of the file; it does so once
    path: Path

    def subset(self, ids: Tensor) -> "MappedImages":
        return replace(self, rows=self.rows[ids], labels=self.labels[ids])

    def gather(self, ids: Tensor) -> Tensor:
        rows = self.rows[ids]
        images = self.images.index_select(0, rows)
        for index in (~self.checked[rows]).nonzero().flatten().tolist():
            row = int(rows[index])
            if hash_of(images[index].numpy().data) != self.hashes[row]:
                path = shlex.quote(str(self.path))
                problem = f"picture {row} in {self.path} is damaged: its hash is another"
                raise DataError(problem, remedy=f"decode it again, and start again: mv {path} {path}.part")
        self.checked[rows] = True
        return images

    def gather_each(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """`gather` of each, in turn; while one is trained on, the kernel reads the next one."""
        for number, part in enumerate(parts):
            for following in parts[number + 1 : number + 2]:
                self._read_ahead(following)
            yield self.gather(part)

    def _read_ahead(self, ids: Tensor) -> None:
        size = self.images[0].nbytes
        for row in self.rows[ids].tolist():
            start = row * size // mmap.PAGESIZE * mmap.PAGESIZE
            self.file.madvise(mmap.MADV_WILLNEED, start, (row + 1) * size - start)

    def to(self, device: torch.device) -> ImageSet:
        if device.type == "cpu":
            return self
        images = torch.empty((len(self), *self.images.shape[1:]), dtype=torch.uint8, device=device)
        for ids in torch.split(torch.arange(len(self)), 256):
            images[ids[0] : ids[-1] + 1] = self.gather(ids)
        return ImageSet(images, self.labels.to(device), self.classes)


def hash_of(pixels: bytes | memoryview) -> int:
    return int.from_bytes(sha256(pixels).digest()[:8], "little")


@dataclass(frozen=True, kw_only=True)
class PictureCache:
    """The file into which the pictures of one split are decoded."""

    root: str | Path | None  # folder of all caches; None for `lit_cifar` in the user's own, which XDG_CACHE_HOME names
    source: str  # origin of the pictures; a cache of the same source with a different digest is deleted
    digest: str  # digest of all that decides the pixels
    limit_gb: float  # most GB that `root` may hold

    def open(self, paths: Sequence[str], *, size: int, read: Callable[[str], Tensor | str]) -> tuple[mmap.mmap, Path]:
        """The file, mapped and read-only: uint8 pixels, (N, 3, size, size), and uint64 hashes, (N,); or a `DataError`.

        The first process that comes writes the file, on all cores; others wait for it. `read` decodes a picture, or
        says why that cannot be done; then each later process tries again.
        """
        path = self._folder / f"{self.digest}.pixels"
        pictures = _Pictures(paths, read, path.with_name(path.name + ".part"), 3 * size * size)
        try:
            if _has_size(path, pictures.num_bytes):
                pictures.try_again(path)
            else:
                with _locked(self._folder):
                    if not _has_size(path, pictures.num_bytes):
                        self._write(pictures, path)
        except OSError as error:
            raise DataError(
                f"decoded pictures cannot be written to {self._folder}: {error.strerror or error}",
                remedy="pass a folder on a disk of this machine with enough room: --data.pictures.cache_dir=FOLDER,\n"
                "or decode them as they are needed: --data.pictures.decode=as_needed",
            ) from error
        # With `torch.from_file` Linux refuses a file that is larger than the memory.
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # otherwise the kernel reads some MB around each picture
        return mapped, path

    @property
    def _root(self) -> Path:
        own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lit_cifar"
        return Path(own if self.root is None else self.root).expanduser().absolute()

    @property
    def _folder(self) -> Path:
        name = re.sub(r"[^\w-]+", "_", Path(self.source.splitlines()[0]).name)[:40]
        return self._root / f"{name}-{sha256(os.fsencode(self.source)).hexdigest()[:12]}"

    def _write(self, pictures: "_Pictures", path: Path) -> None:
        """Decode `pictures` into `path`, or go on where a process was killed."""
        stale = [file for file in self._folder.glob("*.pixels*") if file != pictures.file]
        for file in stale:
            file.unlink()
        others = sum(_size(file) for file in self._root.glob("*/*") if file != pictures.file)
        whole_gb = (others + pictures.num_bytes) / 1e9
        if whole_gb > self.limit_gb:
            raise DataError(
                f"{len(pictures.paths):,} decoded pictures take {pictures.num_bytes / 1e9:.3g} GB: {self._root} would "
                f"hold {whole_gb:.3g} GB of --data.pictures.cache_limit_gb={self.limit_gb:g}",
                remedy=f"pass --data.pictures.cache_limit_gb={whole_gb * 1.01:.3g}, a smaller --data.image_size or "
                f"--data.num_train,\ndelete what nobody needs there: du -sh {shlex.quote(str(self._root))}/*,\n"
                "or decode them as they are needed: --data.pictures.decode=as_needed",
            )
        again = "again, as they or the program have changed, " if stale else ""
        print(
            f"lit_cifar: {len(pictures.paths):,} pictures are decoded once {again}into {path}, "
            f"{pictures.num_bytes / 1e9:.3g} GB; {self._root} then holds {whole_gb:.3g} GB",
            file=sys.stderr,
            flush=True,
        )
        # Not to append: where the file system cannot allocate, the C library writes zeros, and refuses such a file.
        pictures.file.touch()
        with pictures.file.open("r+b") as whole:
            try:
                os.posix_fallocate(whole.fileno(), 0, pictures.num_bytes)  # a full disk is found before the work
            except OSError:
                pictures.file.unlink()
                raise
            pictures.decode_all()
            os.fsync(whole.fileno())
        pictures.file.rename(path)


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):  # another process has just renamed it
        return path.lstat().st_size
    return 0


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for one process. The kernel or a file server unlocks it at its end; workers do not inherit it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            rank_zero_info(f"another process decodes pictures into {folder}: waiting for it")
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


class _Pictures(Dataset[int]):
    """The pictures of a file in chunks, which workers decode into it. An item is the size of its chunk."""

    def __init__(self, paths: Sequence[str], read: Callable[[str], Tensor | str], file: Path, row_bytes: int) -> None:
        self.paths, self.file = paths, file
        self._read, self._row_bytes = read, row_bytes

    @property
    def num_bytes(self) -> int:
        return len(self.paths) * (self._row_bytes + HASH.itemsize)

    def __len__(self) -> int:
        return -(-len(self.paths) // _CHUNK)

    def __getitem__(self, index: int) -> int:
        rows = range(len(self.paths))[index * _CHUNK : (index + 1) * _CHUNK]
        with self.file.open("r+b", buffering=0) as file:
            for row in rows:
                self._decode(row, file.fileno())
        return len(rows)

    def _decode(self, row: int, file: int) -> None:
        """Decode picture `row` into `file`, unless its pixels there agree with their hash."""
        at, hash_at = row * self._row_bytes, len(self.paths) * self._row_bytes + row * HASH.itemsize
        known = int.from_bytes(os.pread(file, HASH.itemsize, hash_at), "little")
        if known and hash_of(os.pread(file, self._row_bytes, at)) == known:
            return
        image, found = self._read(self.paths[row]), UNREADABLE
        if isinstance(image, Tensor):
            pixels = image.numpy().tobytes()
            os.pwrite(file, pixels, at)
            found = hash_of(pixels)
        os.pwrite(file, found.to_bytes(HASH.itemsize, "little"), hash_at)

    def try_again(self, file: Path) -> None:
        """Decode the pictures of `file` that could not be read: the disk may have been at fault."""
        hashes = np.fromfile(file, HASH, offset=len(self.paths) * self._row_bytes)
        if len(rows := np.flatnonzero(hashes == UNREADABLE)):
            with file.open("r+b", buffering=0) as opened:
                for row in rows.tolist():
                    self._decode(row, opened.fileno())

    def decode_all(self) -> None:
        workers = min(len(os.sched_getaffinity(0)), len(self)) if len(self) > 1 else 0
        loader = DataLoader(
            self,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            generator=torch.Generator(),  # DataLoader would otherwise draw a number from that of the training
        )
        with warnings.catch_warnings(), tqdm(total=len(self.paths), unit=" pictures", disable=None) as bar:
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork with threads
            for num_pictures in loader:
                bar.update(num_pictures)
