"""The user's own pictures in folders named after their classes, as torchvision's ImageFolder has them.

`root/train/CLASS/*` or `root/CLASS/*` to train on, `root/val/CLASS/*` to validate on, `root/test/CLASS/*` to test.
Without `root/val` some of the first are held out.
"""

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from lit_cifar.data.dataset import Channels, Dataset, Split
from lit_cifar.data.images import ImageSet
from lit_cifar.data.predict_files import list_files, read_image
from lit_cifar.errors import ConfigError, DataError, printable


class OwnPictures(Dataset):
    """Pictures of any size, cut to their central square and resized. The classes are the folders, sorted by name;
    control characters and bytes that are not UTF-8 are escaped in the name of a class.

    A file that is no picture is an error, a hidden one is passed over. Of a split there is one picture of each class
    in turn, so that the first n are of all classes.
    """

    title = "own pictures"
    # Of ImageNet's photographs, as torchvision's models take them.
    mean: ClassVar[Channels] = (0.485, 0.456, 0.406)
    std: ClassVar[Channels] = (0.229, 0.224, 0.225)

    def __init__(self, root: Path, *, image_size: int | None = None, seed: int = 0) -> None:
        self.image_size = 32 if image_size is None else image_size
        if self.image_size < 1:
            raise ConfigError(f"--data.image_size={image_size} is less than a pixel", remedy="pass one of 32, say")
        super().__init__(root, image_size=image_size, seed=seed)
        folder = self._folder("train")
        others = ("val", "test") if folder == self.root else ()
        self._names = sorted(found.name for found in _folders(folder) if found.name not in others)
        if not self._names:
            raise DataError(f"{folder} holds no folders of pictures", remedy=f"put pictures into {folder}/CLASS/")
        self.classes = tuple(map(printable, self._names))
        if len(set(self.classes)) < len(self.classes):
            raise DataError(f"two folders in {folder} have the same name when printed", remedy="rename one of them")
        self.own_val = (self.root / "val").is_dir()
        self.val_size = len(self._files("val")) if self.own_val else len(self._files("train")) // 10

    def identity(self, name: str) -> str:
        """With the classes: those of another folder are others."""
        return f"{name} of {', '.join(self.classes)}"

    def load(self, split: Split, *, num_images: int | None = None) -> ImageSet:
        files = self._files(split)
        if num_images is not None:
            self.check_number(num_images, split, known=len(files))
        images = torch.stack([self._read(file) for file, _ in files[:num_images]])
        labels = torch.tensor([label for _, label in files[:num_images]])
        return ImageSet(images, labels, self.classes, f"{self.root} {split}")

    def _read(self, file: Path) -> Tensor:
        image = read_image(file, size=self.image_size)
        if isinstance(image, str):
            name = printable(str(file))
            raise DataError(f"{name} cannot be read as a picture: {image}", remedy="replace it, or move it away")
        return image

    def _folder(self, split: Split) -> Path:
        folder = self.root / split
        return self.root if split == "train" and not folder.is_dir() else folder

    def _files(self, split: Split) -> list[tuple[Path, int]]:
        """With their labels: those of each class in the order of their names, one of each class in turn."""
        folder = self._folder(split)
        names = [found.name for found in _folders(folder)]
        unknown = [] if split == "train" else [name for name in names if name not in self._names]
        if unknown:
            found, wanted = (printable(str(place / unknown[0])) for place in (folder, self._folder("train")))
            raise DataError(
                f"{found} is a class without pictures to train on",
                remedy=f"move it away, or put pictures into {wanted}",
            )
        by_class = [(folder / name, label) for label, name in enumerate(self._names) if name in names]
        in_turn = [(turn, label, path / file) for path, label in by_class for turn, file in enumerate(list_files(path))]
        if not in_turn:
            raise DataError(f"{folder} holds no pictures", remedy=f"put some into {folder}/CLASS/")
        return [(file, label) for _, label, file in sorted(in_turn)]


def _folders(folder: Path) -> list[Path]:
    """Those in `folder` that are not hidden."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}", remedy=f"put pictures into {folder}/CLASS/")
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
