"""Reading FashionMNIST through torchvision, in CIFAR-10's shape: grey in three channels, padded to 32 x 32.

Source: Xiao, Rasul, Vollgraf, Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms, 2017.
"""

import shlex
from pathlib import Path
from typing import Any, ClassVar

from torch.nn.functional import pad
from torchvision.datasets import FashionMNIST

from lit_cifar.data.dataset import Channels, Dataset, Split
from lit_cifar.data.download import put_in_place, staging
from lit_cifar.data.images import ImageSet
from lit_cifar.errors import DataError, one_line

CLASSES: tuple[str, ...] = tuple(FashionMNIST.classes)
NUM_IMAGES: dict[Split, int] = {"train": 60_000, "test": 10_000}


class Fashion(Dataset):
    """70,000 images of clothes."""

    title = "FashionMNIST"
    classes = CLASSES
    # The published 0.28604 and 0.35302 of the 28 x 28 images, carried over to 32 x 32 with a share f = (28/32)^2 of
    # pixels that are not padding: mean f * 0.28604, mean square f * (0.35302^2 + 0.28604^2).
    mean: ClassVar[Channels] = (0.21900, 0.21900, 0.21900)
    std: ClassVar[Channels] = (0.33181, 0.33181, 0.33181)

    def prepare(self, *, download: bool) -> None:
        folder = self.root / "FashionMNIST"
        if folder.exists():
            for split in NUM_IMAGES:
                _open(self.root, split)
            return
        remedy = (
            "pass --data.root=FOLDER where FOLDER holds FashionMNIST/raw,\n"
            "or use images drawn by code instead: --data.dataset=synthetic"
        )
        if not download:
            raise DataError(
                f"there is no FashionMNIST in {self.root}, and --data.download=false",
                remedy=f"allow the download with --data.download=true,\nor {remedy}",
            )
        with staging(self.root) as scratch:
            try:
                FashionMNIST(scratch, download=True)
            except (RuntimeError, OSError) as error:
                problem = f"FashionMNIST cannot be downloaded to {self.root}: {one_line(error)}"
                raise DataError(problem, remedy=remedy) from error
            put_in_place(scratch / "FashionMNIST", folder)

    def load(self, split: Split, *, num_images: int | None = None) -> ImageSet:
        dataset = _open(self.root, split)
        images = pad(dataset.data, (2, 2, 2, 2))[:, None].repeat(1, 3, 1, 1)
        return self.first(images, dataset.targets, split, num_images)


def _open(root: Path, split: Split) -> Any:
    """The data set of torchvision, which itself looks at no more than whether the files exist."""
    try:
        dataset = FashionMNIST(root, train=split == "train", download=False)
    except Exception as error:  # its reader asserts, or fails somewhere in torch, on a truncated file
        raise _damaged(root, f"incomplete or damaged ({type(error).__name__}: {error})") from error
    images, labels, expected = dataset.data, dataset.targets, NUM_IMAGES[split]
    found = (tuple(images.shape), tuple(labels.shape))
    if found != ((expected, 28, 28), (expected,)):
        raise _damaged(root, f"not {expected} {split} images of 28 x 28 with a label each: {found}")
    if labels.max() >= len(CLASSES):
        raise _damaged(root, f"damaged: a {split} label is {labels.max()}, and they go from 0 to 9")
    return dataset


def _damaged(root: Path, problem: str) -> DataError:
    folder = root / "FashionMNIST"
    away = shlex.quote(str(folder))
    return DataError(
        f"{folder} is {' '.join(problem.split())}",
        remedy=f"put an undamaged copy in its place, or move {away} away and pass --data.download=true",
    )
