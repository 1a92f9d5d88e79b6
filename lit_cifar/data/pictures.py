"""The user's own pictures as small RGB squares, uint8: folders of classes to train on, or a folder to classify."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar
from unicodedata import normalize

import psutil
import torch
from torch import Tensor

from lit_cifar.data.dataset import Channels, Dataset, Split
from lit_cifar.data.images import ImageSet
from lit_cifar.data.picture_files import IMAGES_WANTED, list_files, read_image, read_images
from lit_cifar.data.picture_folders import SPLITS, File, PictureFolders
from lit_cifar.data.workers import num_cores
from lit_cifar.errors import DataError, bounded, printable


class OwnPictures(Dataset):
    """Pictures of any size in folders named after their classes, as for torchvision's ImageFolder.

    `PictureFolders` says which. Without pictures to validate on some of those to train on are held out, of each class
    alike. A file that is no picture is an error. A split has a picture of each class in turn, so the first n have all.
    """

    title = "own pictures"
    # These are the values of ImageNet's photographs, which torchvision's models take.
    mean: ClassVar[Channels] = (0.485, 0.456, 0.406)
    std: ClassVar[Channels] = (0.229, 0.224, 0.225)

    def __init__(self, root: Path, *, image_size: int | None = None, seed: int = 0) -> None:
        self.image_size = bounded("--data.image_size", 32 if image_size is None else image_size, 1)
        super().__init__(root, image_size=image_size, seed=seed)
        self._unread: dict[Split, list[File]] = {}  # files that are listed and not yet loaded

    # Folders are listed when they are asked for: `predict` needs the classes alone, which a checkpoint holds too.

    @cached_property
    def _folders(self) -> PictureFolders:
        return PictureFolders(self.root)

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self._folders.classes)

    @property
    def own_val(self) -> bool:  # type: ignore[override]
        return "val" in self._folders.splits

    @property
    def has_test(self) -> bool:  # type: ignore[override]
        return "test" in self._folders.splits

    @property
    def val_size(self) -> int:  # type: ignore[override]  # it is known once the pictures are listed, which takes long
        return len(self._files("val")) if self.own_val else len(self._files("train")) // 10

    def hold_out(self, labels: Tensor, num_images: int) -> Tensor:
        """The same share of each class, at least one picture while `num_images` allows; a class's last one at last.

        The choice for fewer images is a part of the choice for more.
        """
        order = super().hold_out(labels, len(labels))
        counts = torch.bincount(labels)
        by_class = torch.argsort(labels[order], stable=True)
        place = torch.empty_like(order)  # place of each picture in its class, in this order
        place[by_class] = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        of_class = counts[labels[order]]
        share = (place + 0.5) / of_class
        share[place == 0], share[place == of_class - 1] = 0, 1
        return order[torch.argsort(share, stable=True)[:num_images]]

    def identity(self, name: str) -> str:
        return f"{name} of {', '.join(self.classes)}"

    def load(self, split: Split, *, num_images: int | None = None) -> ImageSet:
        """List the pictures; they are not decoded yet."""
        every = self._files(split)
        if num_images is not None:
            self.check_number(num_images, split, known=len(every))
        del self._unread[split]
        files = every[:num_images]
        folder = self._folders.folder(split)
        names = normalize("NFC", "\n".join(file.path for file in every))
        self.listed[split] = sha256(names.encode(errors="surrogateescape")).hexdigest()[:16]
        none = torch.empty((0, 3, self.image_size, self.image_size), dtype=torch.uint8)
        labels = torch.tensor([file.label for file in files])
        return EncodedImages(none, labels, self.classes, [f"{folder}/{file.path}" for file in files])

    def found(self, sets: Mapping[str, ImageSet]) -> list[str]:
        read: list[Split] = [split for split in SPLITS if split in sets and len(sets[split])]
        titles: dict[Split, str] = {"train": "train on", "val": "held out"}
        titles |= {split: f"{folder.name}/" for split, folder in self._folders.splits.items()}
        lines = [f"{titles[split]}: {self._counted(sets[split].labels)}" for split in read]
        if self._folders.unused:
            more = f" and {len(self._folders.unused) - 3:,} more" if len(self._folders.unused) > 3 else ""
            lines.append(f"not used: {', '.join(self._folders.unused[:3])}{more}")
        return lines

    def _counted(self, labels: Tensor) -> str:
        counts = dict(zip(self.classes, torch.bincount(labels, minlength=len(self.classes)).tolist(), strict=True))
        if len(counts) <= 10:
            return ", ".join(f"{name} {count:,}" for name, count in counts.items())
        least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        return f"{len(counts):,} classes of {counts[least]:,} ({least}) to {counts[most]:,} ({most}) pictures"

    def _files(self, split: Split) -> list[File]:
        if split not in self._unread:
            self._unread[split] = self._folders.files(split)
        return self._unread[split]


@dataclass(frozen=True)
class EncodedImages(ImageSet):
    """Pictures that are decoded whenever they are gathered. `images` is empty, and tells their size and device."""

    paths: Sequence[str]
    are_encoded: ClassVar[bool] = True

    def subset(self, ids: Tensor) -> "EncodedImages":
        return replace(self, paths=self.packed(ids), labels=self.labels[ids])

    def packed(self, ids: Tensor) -> list[str]:
        return [self.paths[row] for row in ids.tolist()]

    @property
    def unpack(self) -> Callable[[Any], Tensor]:
        return partial(_decoded, size=self.images.shape[2])

    def gather(self, ids: Tensor) -> Tensor:
        return self.unpack(self.packed(ids)).to(self.images.device)

    def in_memory(self, limit_gb: float | None, *, num_processes: int) -> ImageSet:
        shape = len(self), *self.images.shape[1:]
        if not _fits(shape, limit_gb, num_processes=num_processes):
            return self
        images = torch.empty(shape, dtype=torch.uint8)
        errors = read_images(self.paths, images, num_threads=max(1, num_cores() // num_processes))
        if any(errors):
            bad = [f"{printable(path)}: {error}" for path, error in zip(self.paths, errors, strict=True) if error]
            more = "; ..." if len(bad) > 3 else ""
            problem = f"{len(bad):,} of {len(self):,} files cannot be read as pictures: {'; '.join(bad[:3])}{more}"
            raise DataError(problem, remedy="replace them, or hide them by the lines in docs/data-and-networks.md")
        return ImageSet(images, self.labels, self.classes)


def _decoded(paths: list[str], *, size: int) -> Tensor:
    images = torch.empty((len(paths), 3, size, size), dtype=torch.uint8)
    for path, image in zip(paths, images, strict=True):
        found = read_image(path, size=size)
        if isinstance(found, str):
            problem = f"a picture cannot be read: {printable(path)}: {found}"
            raise DataError(problem, remedy="replace it and go on with --resume=auto, or move it away and start again")
        image.copy_(found)
    return images


def _fits(shape: tuple[int, ...], limit_gb: float | None, *, num_processes: int) -> bool:
    """Whether decoded pictures, uint8, of this `shape` may stay in memory: see `in_memory`."""
    limit = free_memory() / 2 / num_processes if limit_gb is None else limit_gb * 1e9
    return torch.Size(shape).numel() <= limit


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the machine has free, or the container; what it keeps of files that nobody reads counts as free."""
    free, stat = psutil.virtual_memory().available, cgroup / "memory.stat"
    with suppress(OSError, ValueError):  # there is no such file, or it says "max"
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = re.findall(r"^inactive_file (\d+)$", stat.read_text(), re.MULTILINE) if stat.exists() else []
        free = min(free, limit - used + sum(map(int, cached)))
    return int(free)


def read_folder(
    folder: Path, *, classes: tuple[str, ...], size: int = 32, limit_gb: float | None = None, num_processes: int = 1
) -> tuple[dict[str, str | None], ImageSet]:
    """Read every file of `folder` and its subfolders, linked ones too, whatever its suffix, except hidden ones.

    Pictures that take more memory than `in_memory` would allow are tried here, and decoded when they are needed.

    Returns:
        The files, relative to the folder and sorted as strings with `/` between their parts, each with one line on why
        it could not be read, or None; and the images of the others in this order, with labels of -1.
    """
    folder = folder.expanduser()
    files = [*list_files(folder)]
    paths, shape = [f"{folder}/{file}" for file in files], (len(files), 3, size, size)
    fits = _fits(shape, limit_gb, num_processes=num_processes)
    images = torch.empty(shape, dtype=torch.uint8, device="cpu" if fits else "meta")
    errors = read_images(paths, images, num_threads=max(1, num_cores() // num_processes))
    readable = torch.tensor([row for row, error in enumerate(errors) if error is None])
    if not len(readable):
        first = f"the first is {files[0]}: {errors[0]}"
        problem = f"none of the {len(files)} files in {folder} can be read as an image; {first}"
        raise DataError(problem, remedy=IMAGES_WANTED)
    labels = torch.full((len(files),), -1)
    encoded = EncodedImages(torch.empty((0, *shape[1:]), dtype=torch.uint8), labels, classes, paths)
    found = ImageSet(images, labels, classes) if fits else encoded
    return dict(zip(files, errors, strict=True)), found if len(readable) == len(files) else found.subset(readable)
