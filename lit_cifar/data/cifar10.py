"""Reading CIFAR-10: the official binary edition, else torchvision's python edition, else a download of the former.

Of the two folders the first that exists counts, even if it is damaged; then it is an error. A link to a disk that is
not mounted counts too: its owner has the data and wants no download.
"""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torchvision.datasets import CIFAR10

from lit_cifar.data.dataset import Channels, Dataset, Split
from lit_cifar.data.download import CIFAR10_BINARY, install, remedies
from lit_cifar.data.images import ImageSet
from lit_cifar.errors import DataError

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

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
        if not os.path.lexists(self.root / CIFAR10_BINARY.folder):
            if os.path.lexists(self.root / CIFAR10.base_folder):
                _open_python_edition(self.root, "test")  # its guard covers the files of both splits
                return
            install(CIFAR10_BINARY, self.root, download=download)
        for split in FILES:
            labels = np.concatenate([records[:, 0].copy() for records in _records(self.root, split)])
            _check_counts(labels, split, self.root / CIFAR10_BINARY.folder)

    def load(self, split: Split, *, num_images: int | None = None) -> ImageSet:
        if os.path.lexists(self.root / CIFAR10_BINARY.folder):
            labels, images = _read_images(self.root, split)
        elif os.path.lexists(self.root / CIFAR10.base_folder):
            dataset = _open_python_edition(self.root, split)
            labels, images = np.asarray(dataset.targets), dataset.data.transpose(0, 3, 1, 2)
        else:
            raise DataError(f"there is no CIFAR-10 in {self.root}", remedy=remedies(CIFAR10_BINARY, self.root))
        whole = torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))
        return self.first(*whole, split, num_images)


def _read_images(root: Path, split: Split) -> tuple[Bytes, Bytes]:
    """Labels, uint8, (N,), and images, uint8, (N, 3, 32, 32), of a split."""
    images = np.empty((len(FILES[split]), RECORDS_PER_FILE, RECORD_BYTES - 1), np.uint8)
    labels = []
    for part, records in zip(images, _records(root, split), strict=True):
        part[:] = records[:, 1:]
        labels.append(records[:, 0].copy())
    whole = np.concatenate(labels)
    _check_counts(whole, split, root / CIFAR10_BINARY.folder)
    return whole, images.reshape(-1, 3, 32, 32)


def _records(root: Path, split: Split) -> Iterator[Bytes]:
    """Those of each file, in the same memory: new memory takes longer to get than to fill.

    uint8, (RECORDS_PER_FILE, 3073): a label, then 1,024 red, green and blue pixels each, row by row. Source: "Binary
    version" on https://www.cs.toronto.edu/~kriz/cifar.html.
    """
    records = np.empty((RECORDS_PER_FILE, RECORD_BYTES), np.uint8)
    for name in FILES[split]:
        _read_file(root / CIFAR10_BINARY.folder / name, into=records)
        yield records


def _read_file(path: Path, *, into: Bytes) -> None:
    """Read a file's records into uint8, (RECORDS_PER_FILE, RECORD_BYTES)."""
    try:
        found = path.stat().st_size
        if found == into.nbytes:
            with path.open("rb", buffering=0) as file:
                file.readinto(into.data)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy=_replace(path.parent)) from error
    if found != into.nbytes:
        raise DataError(
            f"{path} holds {found} bytes, not {into.nbytes} ({RECORDS_PER_FILE} records of {RECORD_BYTES})",
            remedy=_replace(path.parent),
        )
    wrong = np.flatnonzero(into[:, 0] >= len(CLASSES))
    if len(wrong):
        raise DataError(
            f"{path}: record {wrong[0]} has label {into[wrong[0], 0]}; CIFAR-10's are 0 to {len(CLASSES) - 1}",
            remedy=_replace(path.parent),
        )


def _check_counts(labels: Bytes, split: Split, folder: Path) -> None:
    expected = len(labels) // len(CLASSES)
    counts = np.bincount(labels, minlength=len(CLASSES))
    if (counts != expected).any():
        worst = int(np.abs(counts - expected).argmax())
        raise DataError(
            f"{folder} holds {counts[worst]} {split} images of class {CLASSES[worst]}; CIFAR-10 has {expected} of each",
            remedy=_replace(folder),
        )


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
