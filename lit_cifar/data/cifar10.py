"""Reading CIFAR-10: the official binary edition, else torchvision's python edition, else a download of the former.

Of the two folders the first that exists counts, even if it is damaged; then it is an error. A link to a disk that is
not mounted counts too: its owner has the data and wants no download.
"""

import os
import shlex
import tarfile
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import check_integrity, download_url

from lit_cifar.data.dataset import Channels, Dataset, Split
from lit_cifar.data.download import installing
from lit_cifar.data.images import ImageSet
from lit_cifar.errors import DataError

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

# Address and hash as printed on https://www.cs.toronto.edu/~kriz/cifar.html for the binary version.
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FILES: dict[Split, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    "test": ("test_batch.bin",),
}
RECORDS_PER_FILE = 10_000
RECORD_BYTES = 1 + 3 * 32 * 32


class Cifar10(Dataset):
    """60,000 images of 10 classes (A. Krizhevsky, Learning multiple layers of features from tiny images, 2009)."""

    title = "CIFAR-10"
    classes = CLASSES
    mean: ClassVar[Channels] = (0.49140, 0.48216, 0.44653)
    std: ClassVar[Channels] = (0.24703, 0.24349, 0.26159)

    def prepare(self, *, download: bool) -> None:
        if not os.path.lexists(self.root / FOLDER):
            if os.path.lexists(self.root / CIFAR10.base_folder):
                _open_python_edition(self.root, "test")  # its guard covers the files of both splits
                return
            _install(self.root, download=download)
        for split in FILES:
            _records(self.root / FOLDER, split)

    def load(self, split: Split, *, num_images: int | None = None) -> ImageSet:
        if os.path.lexists(self.root / FOLDER):
            records = _records(self.root / FOLDER, split)
            labels = np.concatenate([part[:, 0] for part in records])
            images = np.concatenate([part[:, 1:] for part in records]).reshape(-1, 3, 32, 32)
        elif os.path.lexists(self.root / CIFAR10.base_folder):
            dataset = _open_python_edition(self.root, split)
            labels, images = np.asarray(dataset.targets), np.ascontiguousarray(dataset.data.transpose(0, 3, 1, 2))
        else:
            raise DataError(f"there is no CIFAR-10 in {self.root}", remedy=_remedies(self.root))
        return self.first(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), split, num_images)


def _install(root: Path, *, download: bool) -> None:
    """Make the folder of the binary edition, from an archive that already lies in `root` or else from the web."""
    present = root / URL.rpartition("/")[2]
    if not present.exists() and not download:
        raise DataError(f"there is no CIFAR-10 in {root}, and --data.download=false", remedy=_remedies(root))
    with installing(root / FOLDER, "CIFAR-10", remedy=_remedies(root, tried=True)) as scratch:
        if not present.exists():
            download_url(URL, scratch, md5=MD5)
        elif not check_integrity(present, MD5):
            raise DataError(
                f"{present} is not the official archive: its md5 is not {MD5}",
                remedy=f"delete it (it may be half a download) and run again, or fetch {URL} anew",
            )
        with tarfile.open(present if present.exists() else scratch / present.name) as tar:
            tar.extractall(scratch, filter="data")


def _remedies(root: Path, *, tried: bool = False) -> str:
    """The three ways out when CIFAR-10 cannot be had, in three lines; `tried` says that a download has failed."""
    allow = "" if tried else "allow the download with --data.download=true, or "
    return (
        f"pass --data.root=FOLDER where FOLDER holds {FOLDER} or {CIFAR10.base_folder},\n"
        f"or {allow}put {URL} into {shlex.quote(str(root))} by hand,\n"
        "or use images drawn by code instead: --data.dataset=synthetic"
    )


def _records(folder: Path, split: Split) -> list[Bytes]:
    """Those of each file, with their labels checked.

    uint8, (RECORDS_PER_FILE, 3073): a label, then 1,024 red, green and blue pixels each, row by row. Source: "Binary
    version" on https://www.cs.toronto.edu/~kriz/cifar.html.
    """
    records = [_read_file(folder / name) for name in FILES[split]]
    counts = np.sum([np.bincount(part[:, 0], minlength=256) for part in records], axis=0)
    expected = len(records) * RECORDS_PER_FILE // len(CLASSES)
    if (counts[: len(CLASSES)] != expected).any():
        raise DataError(
            f"{folder} does not hold {expected} {split} images of each class, as CIFAR-10 does",
            remedy=_replace(folder),
        )
    return records


def _read_file(path: Path) -> Bytes:
    wanted = RECORDS_PER_FILE * RECORD_BYTES
    try:
        found = path.stat().st_size
        if found == wanted:
            return np.frombuffer(path.read_bytes(), np.uint8).reshape(RECORDS_PER_FILE, RECORD_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy=_replace(path.parent)) from error
    raise DataError(f"{path} holds {found} bytes, not {wanted}", remedy=_replace(path.parent))


def _open_python_edition(root: Path, split: Split) -> Any:
    """The data set of torchvision, which compares every file's md5 before it unpickles any: a pickle can run code."""
    try:
        return CIFAR10(root, train=split == "train", download=False)
    except (RuntimeError, OSError) as error:
        folder = root / CIFAR10.base_folder
        raise DataError(
            f"{folder} is incomplete, or differs from the official files by md5 ({error})", remedy=_replace(folder)
        ) from error


def _replace(folder: Path) -> str:
    return (
        f"put an undamaged copy in its place, or move {shlex.quote(str(folder))} away and pass --data.download=true,\n"
        "or use images drawn by code instead: --data.dataset=synthetic"
    )
