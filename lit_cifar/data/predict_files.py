"""A folder of the user's own images, made into what the network was trained on: small RGB squares, uint8."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from lit_cifar.data.images import ImageSet
from lit_cifar.errors import DataError

# What is read, whatever a file is called. Pillow knows forty more formats, most of them old, and starts Ghostscript for
# one.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")


@dataclass(frozen=True)
class FolderImages:
    """The files of a folder in input order, and the images among them."""

    files: tuple[Path, ...]  # paths relative to the folder, sorted as strings with `/` between their parts
    errors: tuple[str | None, ...]  # for each file None, or one line on why it could not be read
    images: ImageSet  # the readable files' images in the same order, with labels of -1


def read_folder(folder: Path, *, classes: tuple[str, ...], size: int = 32) -> FolderImages:
    """Read every file of `folder` and its subfolders, whatever its suffix, except hidden ones.

    A file that is no image of `FORMATS`, or a damaged one, gets an entry in `errors`. An image is turned upright as its
    EXIF orientation says, laid on white where it is transparent, cut to its central square and resized by antialiased
    bicubic interpolation to `size` pixels. Of an animation the first frame counts.
    """
    folder = folder.expanduser()
    files = list_files(folder)
    outcomes = [read_image(folder / file, size=size) for file in files]
    images = [outcome for outcome in outcomes if isinstance(outcome, Tensor)]
    errors = tuple(outcome if isinstance(outcome, str) else None for outcome in outcomes)
    if not images:
        raise DataError(
            f"none of the {len(files)} files in {folder} can be read as an image; the first is {files[0]}: {errors[0]}",
            remedy="name a folder that holds images, e.g. PNG or JPEG files",
        )
    labels = torch.full((len(images),), -1)
    return FolderImages(files, errors, ImageSet(torch.stack(images), labels, classes, str(folder)))


def list_files(folder: Path) -> tuple[Path, ...]:
    """Regular files and broken links, relative to `folder`; nothing that could block, such as a named pipe."""
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {problem}", remedy="name a folder that holds images, e.g. PNG or JPEG files")
    try:
        entries = [path for path in folder.rglob("*") if path.is_file() or (path.is_symlink() and not path.exists())]
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error}", remedy="make it readable, or copy it") from error
    files = (path.relative_to(folder) for path in entries)
    visible = (file for file in files if not any(part.startswith(".") for part in file.parts))
    listed = tuple(sorted(visible, key=Path.as_posix))
    if not listed:
        raise DataError(f"{folder} holds no files", remedy="name a folder that holds images, e.g. PNG or JPEG files")
    return listed


def read_image(path: Path, *, size: int) -> Tensor | str:
    """The image, uint8, (3, size, size), or one line on why there is none."""
    try:
        with warnings.catch_warnings():
            # What Pillow merely finds odd (broken metadata) is no concern here; what may fill the memory is.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                upright = ImageOps.exif_transpose(image)
                square = ImageOps.fit(_to_rgb(upright), (size, size), method=Image.Resampling.BICUBIC)
    except UnidentifiedImageError:
        return f"not an image ({', '.join(FORMATS)})"
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return f"larger than {Image.MAX_IMAGE_PIXELS} pixels"
    except OSError as error:
        return error.strerror or _one_line(error)
    except Exception as error:  # decoders raise nearly anything on damaged data, SyntaxError and TypeError too
        return _one_line(error)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow's own conversion clips 16-bit greys at 255 instead of scaling them
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
