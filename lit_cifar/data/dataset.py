"""The data sets by name, and their base. A damaged one is never repaired, or replaced by another in silence."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from torch import Tensor

from lit_cifar.data.counter_rng import Purpose, keyed_permutation
from lit_cifar.data.images import ImageSet
from lit_cifar.errors import ConfigError, nearest

Split: TypeAlias = Literal["train", "val", "test"]
Channels: TypeAlias = tuple[float, float, float]

# The class of each data set, which is imported when it is asked for.
DATASETS = {
    "cifar10": "cifar10.Cifar10",
    "cifar100": "cifar10.Cifar100",
    "synthetic": "synthetic.Synthetic",
    "folder": "pictures.OwnPictures",
}


class Dataset(ABC):
    """Images in `root`, which are not read before `load` is called.

    Call `prepare` once per node, then `load` in every process. `image_size` is in pixels, `seed` that of drawn images.
    """

    title: ClassVar[str]  # name in logs and tables
    classes: tuple[str, ...]  # names of the classes, by label
    mean: ClassVar[Channels]  # mean of a channel over the training set's pixels, in units of the full range, 0 to 1
    std: ClassVar[Channels]  # the same for the standard deviation
    image_size: int = 32  # height and width of the images, in pixels
    val_size: int = 5000  # training images that are held out where the user names no number
    # Whether there are images to validate on beside those to train on; `val_size` is then their number.
    own_val: bool = False
    has_test: bool = True  # whether it has images to test on

    def __init__(self, root: Path, *, image_size: int | None = None, seed: int = 0) -> None:
        if image_size not in (None, self.image_size):
            problem = f"--data.image_size={image_size}, but images of {self.title} have {self.image_size}"
            raise ConfigError(problem, remedy="leave it out; pictures of --data.dataset=folder have any size")
        self.root, self.seed = root.expanduser(), seed
        # Digest of the names of the user's own files in each split that was loaded.
        self.listed: dict[Split, str] = {}

    def identity(self, name: str) -> str:
        """Text by which a checkpoint knows the data set that is registered as `name`."""
        return name

    def hold_out(self, labels: Tensor, num_images: int) -> Tensor:
        """Positions of `num_images` training images to validate on, int64; `labels` are those of all, int64, (N,)."""
        return keyed_permutation(len(labels), seed=self.seed, epoch=0, purpose=Purpose.SPLIT)[:num_images]

    def found(self, sets: Mapping[str, ImageSet]) -> list[str]:
        """Lines about the classes and pictures of each split, where they are the user's own."""
        return []

    def prepare(self, *, download: bool) -> None:  # noqa: B027  # some have nothing to do
        """Make sure the data are under `root` and sound, downloading them if they are absent and `download` allows it.

        A `DataError` says what is incomplete or damaged, or absent and cannot be had.
        """

    @abstractmethod
    def load(self, split: Split, *, num_images: int | None = None) -> ImageSet:
        """Read the first `num_images` images of a split, by default all; a `ConfigError` if there are fewer."""

    def first(self, images: Tensor, labels: Tensor, split: Split, num_images: int | None) -> ImageSet:
        if num_images is not None:
            self.check_number(num_images, split, known=len(labels))
            # Copies, because a view would keep the memory of the whole set.
            images, labels = images[:num_images].clone(), labels[:num_images].clone()
        return ImageSet(images, labels, self.classes)

    def check_number(self, num_images: int, split: Split, *, known: int) -> None:
        if not 1 <= num_images <= known:
            problem = f"{num_images} {split} images asked of {self.title}, which has {known}"
            raise ConfigError(problem, remedy=f"ask for 1 to {known}, e.g. --data.num_{split}={known}")


def open_dataset(name: str, root: str | Path, *, image_size: int | None = None, seed: int = 0) -> Dataset:
    """The data set called `name`, with `Dataset`'s arguments."""
    if name not in DATASETS:
        guess = f"did you mean --data.dataset={meant}? " if (meant := nearest(name, DATASETS)) else ""
        raise ConfigError(f"there is no data set {name!r}", remedy=f"{guess}choose one of {', '.join(DATASETS)}")
    module, _, kind = DATASETS[name].partition(".")
    dataset: type[Dataset] = getattr(import_module(f"lit_cifar.data.{module}"), kind)
    return dataset(Path(root), image_size=image_size, seed=seed)
