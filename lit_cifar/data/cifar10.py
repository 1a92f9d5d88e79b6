"""Reading CIFAR-10 and CIFAR-100: the binary edition, else torchvision's python edition, else a download of the former.

Of the two folders the first that exists counts, even if it is damaged; then it is an error. A link to a disk that is
not mounted counts too: its owner has the data and wants no download.
"""

import math
import os
import shlex
import tarfile
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import download_url

from lit_cifar.data.dataset import Channels, Dataset, Split
from lit_cifar.data.download import SYNTHETIC, installing, replacing
from lit_cifar.data.images import ImageSet
from lit_cifar.errors import DataError

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

CLASSES: tuple[str, ...] = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLASSES_100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""  # the fine labels, in alphabetical order
NUM_IMAGES: dict[Split, int] = {"train": 50_000, "test": 10_000}
IMAGE_BYTES = 3 * 32 * 32


class Cifar10(Dataset):
    """60,000 images of 10 classes (A. Krizhevsky, Learning multiple layers of features from tiny images, 2009)."""

    title = "CIFAR-10"
    classes = CLASSES
    mean: ClassVar[Channels] = (0.49140, 0.48216, 0.44653)
    std: ClassVar[Channels] = (0.24703, 0.24349, 0.26159)
    # The binary edition: address and hash printed on https://www.cs.toronto.edu/~kriz/cifar.html, the folder in the
    # archive, its files, each with equally many images of a split, and the labels before an image: the last counts.
    url = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    md5 = "c32a1d4ab5d03f1284b67883e8d87530"
    folder = "cifar-10-batches-bin"
    files: ClassVar[dict[Split, tuple[str, ...]]] = {
        "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        "test": ("test_batch.bin",),
    }
    label_bytes = 1
    python_edition: ClassVar[Any] = CIFAR10

    def prepare(self, *, download: bool) -> None:
        if not os.path.lexists(self.root / self.folder):
            if not download or os.path.lexists(self.root / self.python_edition.base_folder):
                self._open_python_edition("test")  # torchvision checks the files of both splits
                return
            with installing(self.root / self.folder, self.title, remedy=self._remedies(tried=True)) as scratch:
                download_url(self.url, scratch, "archive", self.md5)
                with tarfile.open(scratch / "archive") as tar:
                    tar.extractall(scratch, filter="data")
        for split in self.files:
            self._records(split)

    def load(self, split: Split, *, num_images: int | None = None) -> ImageSet:
        if os.path.lexists(self.root / self.folder):
            records = self._records(split)
            labels = np.concatenate([part[:, -IMAGE_BYTES - 1] for part in records])
            images = np.concatenate([part[:, -IMAGE_BYTES:] for part in records]).reshape(-1, 3, 32, 32)
        else:
            dataset = self._open_python_edition(split)
            labels, images = np.asarray(dataset.targets), np.ascontiguousarray(dataset.data.transpose(0, 3, 1, 2))
        return self.first(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), split, num_images)

    def _remedies(self, *, tried: bool = False) -> str:
        """The three ways out when the data cannot be had, in three lines; `tried` says that a download has failed."""
        allow = "" if tried else "allow the download with --data.download=true, or "
        return (
            f"pass --data.root=FOLDER where FOLDER holds {self.folder} or {self.python_edition.base_folder},\n"
            f"or {allow}unpack {self.url} in {shlex.quote(str(self.root))} by hand,\n{SYNTHETIC}"
        )

    def _records(self, split: Split) -> list[Bytes]:
        """The records of each file, with their labels checked.

        Each is uint8, (n, label_bytes + 3072): labels, then 1,024 red, green and blue pixels each, row by row. Source:
        "Binary version" on https://www.cs.toronto.edu/~kriz/cifar.html.
        """
        folder, num_images = self.root / self.folder, NUM_IMAGES[split]
        shape = num_images // len(self.files[split]), self.label_bytes + IMAGE_BYTES
        records = [_read_file(folder / name, shape) for name in self.files[split]]
        counts = np.sum([np.bincount(part[:, -IMAGE_BYTES - 1], minlength=256) for part in records], axis=0)
        expected = num_images // len(self.classes)
        if (counts[: len(self.classes)] != expected).any():
            problem = f"{folder} does not hold {expected} {split} images of each class, as {self.title} does"
            raise DataError(problem, remedy=replacing(folder))
        return records

    def _open_python_edition(self, split: Split) -> Any:
        """The edition of torchvision, which compares all md5 before it unpickles a file: a pickle can run code."""
        folder = self.root / self.python_edition.base_folder
        if not os.path.lexists(folder):
            raise DataError(f"there is no {self.title} in {self.root}", remedy=self._remedies())
        try:
            return self.python_edition(self.root, train=split == "train", download=False)
        except (RuntimeError, OSError) as error:
            problem = f"{folder} is incomplete, or differs from the official files by md5 ({error})"
            raise DataError(problem, remedy=replacing(folder)) from error


class Cifar100(Cifar10):
    """60,000 images of 100 classes; their 20 coarse labels are not read."""

    title = "CIFAR-100"
    classes = tuple(CLASSES_100.split())
    mean: ClassVar[Channels] = (0.50708, 0.48655, 0.44092)
    std: ClassVar[Channels] = (0.26733, 0.25644, 0.27615)
    url = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
    md5 = "03b5dce01913d631647c71ecec9e9cb8"
    folder = "cifar-100-binary"
    files: ClassVar[dict[Split, tuple[str, ...]]] = {"train": ("train.bin",), "test": ("test.bin",)}
    label_bytes = 2
    python_edition: ClassVar[Any] = CIFAR100


def _read_file(path: Path, shape: tuple[int, int]) -> Bytes:
    try:
        if (found := path.stat().st_size) == math.prod(shape):
            return np.fromfile(path, np.uint8).reshape(shape)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy=replacing(path.parent)) from error
    raise DataError(f"{path} holds {found} bytes, not {math.prod(shape)}", remedy=replacing(path.parent))
