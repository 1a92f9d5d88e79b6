"""Reading FashionMNIST (Xiao, Rasul, Vollgraf, 2017) in CIFAR-10's shape: grey in three channels, padded to 32 x 32."""

from pathlib import Path
from typing import Any, ClassVar

from torch.nn.functional import pad
from torchvision.datasets import FashionMNIST

from lit_cifar.data.dataset import Channels, Dataset, Split
from lit_cifar.data.download import SYNTHETIC, installing, replacing
from lit_cifar.data.images import ImageSet
from lit_cifar.errors import DataError, one_line

NUM_IMAGES: dict[Split, int] = {"train": 60_000, "test": 10_000}


class Fashion(Dataset):
    """70,000 images of clothes."""

    title = "FashionMNIST"
    classes = tuple(FashionMNIST.classes)
    # The published 0.28604 and 0.35302 of the 28 x 28 images, carried over to 32 x 32 with a share f = (28/32)^2 of
    # pixels that are not padding: mean f * 0.28604, mean square f * (0.35302^2 + 0.28604^2).
    mean: ClassVar[Channels] = (0.21900, 0.21900, 0.21900)
    std: ClassVar[Channels] = (0.33181, 0.33181, 0.33181)

    def prepare(self, *, download: bool) -> None:
        folder = self.root / "FashionMNIST"
        if folder.exists() or folder.is_symlink():
            for split in NUM_IMAGES:
                _open(self.root, split)
            return
        remedy = f"pass --data.root=FOLDER where FOLDER holds FashionMNIST/raw,\n{SYNTHETIC}"
        if not download:
            remedy = f"allow the download with --data.download=true,\nor {remedy}"
            raise DataError(f"there is no FashionMNIST in {self.root}", remedy=remedy)
        with installing(folder, self.title, remedy=remedy) as scratch:
            FashionMNIST(scratch, download=True)

    def load(self, split: Split, *, num_images: int | None = None) -> ImageSet:
        dataset = _open(self.root, split)
        images = pad(dataset.data, (2, 2, 2, 2))[:, None].repeat(1, 3, 1, 1)
        return self.first(images, dataset.targets, split, num_images)


def _open(root: Path, split: Split) -> Any:
    """The data set of torchvision, which checks only that the files exist."""
    folder, expected = root / "FashionMNIST", NUM_IMAGES[split]
    try:
        dataset = FashionMNIST(root, train=split == "train", download=False)
        labels = dataset.targets
        if dataset.data.shape != (expected, 28, 28) or labels.shape != (expected,) or labels.max() >= 10:
            raise ValueError(f"not {expected} {split} images of 28 x 28, each with a label from 0 to 9")
    except Exception as error:  # on a truncated file the reader asserts, or fails somewhere in torch
        problem = f"{folder} is incomplete or damaged ({type(error).__name__}: {one_line(error)})"
        raise DataError(problem, remedy=replacing(folder)) from error
    return dataset
