"""The data sets by name. A damaged one is an error: it is never repaired, or replaced by another in silence."""

from importlib import import_module
from pathlib import Path

from lit_cifar.data.dataset import Dataset
from lit_cifar.errors import ConfigError, nearest

# The class of each data set, which is imported when it is asked for.
DATASETS = {
    "cifar10": "cifar10.Cifar10",
    "cifar100": "cifar10.Cifar100",
    "fashion_mnist": "fashion_mnist.Fashion",
    "synthetic": "synthetic.Synthetic",
    "folder": "pictures.OwnPictures",
}


def open_dataset(name: str, root: str | Path, *, image_size: int | None = None, seed: int = 0) -> Dataset:
    """The data set called `name`, with `Dataset`'s arguments."""
    if name not in DATASETS:
        guess = f"did you mean --data.dataset={meant}? " if (meant := nearest(name, DATASETS)) else ""
        raise ConfigError(f"there is no data set {name!r}", remedy=f"{guess}choose one of {', '.join(DATASETS)}")
    module, _, kind = DATASETS[name].partition(".")
    dataset: type[Dataset] = getattr(import_module(f"lit_cifar.data.{module}"), kind)
    return dataset(Path(root), image_size=image_size, seed=seed)
