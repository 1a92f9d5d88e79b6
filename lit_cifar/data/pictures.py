"""The user's own pictures as small RGB squares, uint8: folders of classes to train on, or a folder to classify."""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar
from unicodedata import normalize

import numpy as np
import PIL
import torch
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image, ImageOps, ImagePalette, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, COLORMAP, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT, TiffImageFile
from torch import Tensor

from lit_cifar.data.dataset import Channels, Dataset, Split
from lit_cifar.data.encoded_pictures import EncodedImages
from lit_cifar.data.images import ImageSet
from lit_cifar.data.options import Pictures
from lit_cifar.data.picture_cache import FORMAT, HASH, UNREADABLE, MappedImages, PictureCache
from lit_cifar.data.picture_folders import IMAGES_WANTED, SPLITS, File, PictureFolders, list_files
from lit_cifar.errors import ConfigError, DataError, one_line, printable

# The formats that are read, whatever a file is called. Pillow knows forty more, most of them old, and starts
# Ghostscript for one.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")


class OwnPictures(Dataset):
    """Pictures of any size in folders named after their classes, as for torchvision's ImageFolder.

    `root/train/CLASS/*` or `root/CLASS/*` to train on, `root/val/CLASS/*` to validate on, `root/test/CLASS/*` to test,
    or other usual names of these. Without `root/val` some of the first are held out, of each class alike. The classes
    are the folders, sorted by name; control characters and bytes that are not UTF-8 are escaped in the name of a class,
    and letters with accents are composed (NFC).

    A folder that looks like a split and is not used is an error, as it would be a class, or be missed. A file that is
    no picture is an error, or left out with `skip_unreadable`; a hidden one is passed over. Of a split there is one
    picture of each class in turn, so that the first n are of all classes.
    """

    title = "own pictures"
    # These are the values of ImageNet's photographs, which torchvision's models take.
    mean: ClassVar[Channels] = (0.485, 0.456, 0.406)
    std: ClassVar[Channels] = (0.229, 0.224, 0.225)

    def __init__(
        self,
        root: Path,
        *,
        image_size: int | None = None,
        seed: int = 0,
        pictures: Pictures | None = None,
    ) -> None:
        self.image_size = 32 if image_size is None else image_size
        if self.image_size < 1:
            raise ConfigError(f"--data.image_size={image_size} is less than a pixel", remedy="pass one of 32, say")
        super().__init__(root, image_size=image_size, seed=seed)
        self._read = pictures or Pictures()
        self._read.check(self.image_size)
        self._size = self._read.decoded_size or self.image_size
        self._unread: dict[Split, list[File]] = {}  # files that are listed and not yet loaded

    # The folders are listed when they are asked for: `predict` needs only the names of the classes, which a checkpoint
    # holds too.

    @cached_property
    def _folders(self) -> PictureFolders:
        return PictureFolders.of(self.root)

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
        """The same share of each class, at least one picture while `num_images` allows, and never a class's last one.

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
        """Text by which a checkpoint knows the data set; it contains the classes, which differ between folders."""
        return f"{name} of {', '.join(self.classes)}"

    def load(self, split: Split, *, num_images: int | None = None) -> ImageSet:
        """Decode the pictures once, into a file that later calls and processes map; or leave them for later."""
        every = self._files(split)
        if num_images is not None:
            self.check_number(num_images, split, known=len(every))
        del self._unread[split]
        files = every[:num_images]
        folder = self._folders.folder(split)
        paths = [f"{folder}/{file.path}" for file in files]
        labels = torch.tensor([file.label for file in files])
        read = partial(read_image, size=self._size)
        if self._read.decode == "as_needed":
            self.listed[split] = _digest(every)
            none = torch.empty((0, 3, self._size, self._size), dtype=torch.uint8)
            rows, workers = torch.arange(len(paths)), self._read.num_workers
            return EncodedImages(none, labels, self.classes, paths, rows, read, workers)
        of_pixels = repr((FORMAT, PIL.__version__, self._size, files))
        cache = PictureCache(
            root=self._read.cache_dir,
            source="\n".join([str(self.root.resolve()), split, str(self._size), str(num_images)]),
            digest=sha256(of_pixels.encode(errors="surrogateescape")).hexdigest()[:16],
            limit_gb=self._read.cache_limit_gb,
        )
        file, cached = cache.open(paths, size=self._size, read=read)
        shape = (len(paths), 3, self._size, self._size)
        hashes = np.frombuffer(file, HASH, offset=math.prod(shape))
        unreadable = hashes == UNREADABLE
        self._judge([path for path, bad in zip(paths, unreadable, strict=True) if bad], len(paths))
        self.listed[split] = _digest([*compress(files, ~unreadable), *every[len(files) :]])
        rows = torch.from_numpy(np.flatnonzero(~unreadable))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the buffer is read-only; nobody writes to it
            images = torch.frombuffer(file, dtype=torch.uint8, count=math.prod(shape)).view(shape)
        checked = torch.zeros(len(files), dtype=torch.bool)
        return MappedImages(images, labels[rows], self.classes, file, rows, hashes, checked, cached)

    def _judge(self, unreadable: list[str], num_files: int) -> None:
        """Refuse pictures that cannot be read, or say that they are left out."""
        if not unreadable:
            return
        number = f"{len(unreadable):,} of {num_files:,} files cannot be read as pictures"
        if self._read.skip_unreadable and len(unreadable) < num_files:
            rank_zero_warn(f"{number} and are left out; the first is {printable(unreadable[0])}")
            return
        found = [(path, read_image(path, size=1)) for path in unreadable[:3]]
        again = "the second time it could be read"
        listed = "; ".join(f"{printable(path)}: {why if isinstance(why, str) else again}" for path, why in found)
        raise DataError(
            f"{number}: {listed}" + ("; ..." if len(unreadable) > 3 else ""),
            remedy="replace them, move them away, or leave them out: --data.pictures.skip_unreadable=true",
        )

    def found(self, sets: Mapping[str, ImageSet]) -> list[str]:
        read: list[Split] = [split for split in SPLITS if split in sets and len(sets[split])]
        lines = [f"{self._title(split)}: {self._counted(sets[split].labels)}" for split in read]
        if self.has_test and "test" not in sets:
            try:
                of_test = self._counted(torch.tensor([file.label for file in self._files("test")]))
            except DataError as error:  # this concerns `test` alone, which reports it itself
                of_test = error.problem
            lines.append(f"{self._title('test')}: {of_test}")
        if self._folders.unused:
            more = f" and {len(self._folders.unused) - 3:,} more" if len(self._folders.unused) > 3 else ""
            lines.append(f"not used: {', '.join(self._folders.unused[:3])}{more}")
        return lines

    def _title(self, split: Split) -> str:
        used = self._folders.splits.get(split)
        return f"{used.name}/" if used else {"train": "train on", "val": "held out"}[split]

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


def _digest(files: Iterable[File]) -> str:
    """Digest of the names of `files`, to tell whether the same pictures could be read."""
    names = normalize("NFC", "\n".join(file.path for file in files))
    return sha256(names.encode(errors="surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True)
class FolderImages:
    """The files of a folder in input order, and the images among them."""

    files: tuple[Path, ...]  # paths relative to the folder, sorted as strings with `/` between their parts
    errors: tuple[str | None, ...]  # one line on why a file could not be read, or None
    images: ImageSet  # the readable files' images in the same order, with labels of -1


def read_folder(folder: Path, *, classes: tuple[str, ...], size: int = 32) -> FolderImages:
    """Read every file of `folder` and its subfolders, linked ones too, whatever its suffix, except hidden ones.

    A file that is no image of `FORMATS`, or a damaged one, gets an entry in `errors`.
    """
    folder = folder.expanduser()
    files = tuple(map(Path, list_files(folder)))
    outcomes = [read_image(folder / file, size=size) for file in files]
    images = [outcome for outcome in outcomes if isinstance(outcome, Tensor)]
    errors = tuple(outcome if isinstance(outcome, str) else None for outcome in outcomes)
    if not images:
        raise DataError(
            f"none of the {len(files)} files in {folder} can be read as an image; the first is {files[0]}: {errors[0]}",
            remedy=IMAGES_WANTED,
        )
    labels = torch.full((len(images),), -1)
    return FolderImages(files, errors, ImageSet(torch.stack(images), labels, classes))


def read_image(path: Path | str, *, size: int) -> Tensor | str:
    """The image, uint8, (3, size, size), or one line on why there is none.

    It is turned upright as its EXIF orientation says, laid on white where it is transparent, cut to its central square
    and resized by antialiased bicubic interpolation. Of an animation the first frame counts.
    """
    try:
        with warnings.catch_warnings():
            # Warnings of Pillow, such as on broken metadata, are no concern here, except those of what may fill the
            # memory.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                if not _has_range(image):
                    what = f"{image.format} of mode {image.mode}"
                    return f"{what}: no black and white are told; save it with 8 or 16 bits"
                _scale_colours(image)
                scale = _grey_scale(image)  # `upright` has no tags
                upright = ImageOps.exif_transpose(image)
                square = ImageOps.fit(_to_rgb(upright, *scale), (size, size), method=Image.Resampling.BICUBIC)
    except UnidentifiedImageError:
        return f"not an image ({', '.join(FORMATS)})"
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return f"larger than {Image.MAX_IMAGE_PIXELS} pixels"
    except Exception as error:  # decoders raise nearly anything on damaged data, even SyntaxError
        return getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error)}"
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def _tags(image: Image.Image) -> Mapping[int, Any]:
    """The tags of a TIFF file, by number; none of other files."""
    return image.tag_v2 if isinstance(image, TiffImageFile) else {}


def _has_range(image: Image.Image) -> bool:
    """Whether the file tells which values are black and white.

    Integers of 32 bits usually hold smaller ones, and real numbers anything; Pillow clips both at 255. It reads signed
    bytes as unsigned ones. From a PGM file it makes integers up to 65535.
    """
    signed = 2 in _tags(image).get(SAMPLEFORMAT, ())
    return not signed and image.mode != "F" and (image.mode != "I" or image.format == "PPM")


def _scale_colours(image: Image.Image) -> None:
    """Scale a palette and a transparent colour like the pixels, before these are decoded."""
    colours, transparent = _tags(image).get(COLORMAP), image.info.get("transparency")
    if colours and max(colours) < 256:  # they should have 16 bits: Pillow would make all black
        image.palette = ImagePalette.raw("RGB;L", bytes(colours))
    if isinstance(image, PngImageFile) and isinstance(transparent, tuple) and image.tile[0].args == "RGB;16B":
        # The pixels lose their low bytes.
        image.info["transparency"] = tuple(value >> 8 for value in transparent)
    if isinstance(image, PngImageFile) and isinstance(transparent, int) and image.mode == "L":
        image.info["transparency"] = transparent * {"L;2": 85, "L;4": 17}.get(str(image.tile[0].args), 1)


def _grey_scale(image: Image.Image) -> tuple[int, bool]:
    """The number of bits of a grey with more than 8, and whether 0 is white."""
    tags = _tags(image)
    return tags.get(BITSPERSAMPLE, (16,))[0], tags.get(PHOTOMETRIC_INTERPRETATION) == 0


def _to_rgb(image: Image.Image, bits: int, inverted: bool) -> Image.Image:
    if image.mode.startswith("I"):  # Pillow's own conversion clips greys at 255 instead of scaling them
        values = np.asarray(image)
        grey = (values >> bits - 8).astype(np.uint8)
        if inverted:
            grey = 255 - grey
        grey[values == image.info.get("transparency")] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
