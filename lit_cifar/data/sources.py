"""The data sets by name. A damaged one is an error: it is never repaired, or replaced by another in silence."""

from pathlib import Path

from lit_cifar.data.cifar10 import Cifar10
from lit_cifar.data.dataset import Dataset
from lit_cifar.data.fashion_mnist import Fashion
from lit_cifar.data.pictures import OwnPictures
from lit_cifar.data.synthetic import Synthetic
from lit_cifar.errors import ConfigError, nearest

DATASETS: dict[str, type[Dataset]] = {
    "cifar10": Cifar10,
    "fashion_mnist": Fashion,
    "synthetic": Synthetic,
    "folder": OwnPictures,
}


def open_dataset(name: str, root: str | Path, *, image_size: int | None = None, seed: int = 0) -> Dataset:
    """The data set called `name`, with `Dataset`'s arguments."""
    if name not in DATASETS:
        meant = nearest(name, DATASETS)
        guess = "" if meant is None else f"did you mean --data.dataset={meant}? "
        raise ConfigError(f"there is no data set {name!r}", remedy=f"{guess}choose one of {', '.join(DATASETS)}")
    return DATASETS[name](Path(root), image_size=image_size, seed=seed)
