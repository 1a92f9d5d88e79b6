"""Files of pictures: those in a folder, and what one of them shows."""

import os
import shlex
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import COLORMAP, SAMPLEFORMAT, TiffImageFile
from torch import Tensor
from tqdm import tqdm

from lit_cifar.errors import DataError, one_line, printable

# The formats that are read, whatever a file is called. Pillow knows forty old ones, and starts Ghostscript for one.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
_OF_SYSTEMS = {"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found", "Thumbs.db"}
_OF_SYSTEMS |= {"desktop.ini", "Icon\r"}
_SUBFILE_TYPE = 254  # a tag of TIFF
_CHUNK = 32  # pictures that a thread decodes at a time
IMAGES_WANTED = "name a folder that holds images, e.g. PNG or JPEG files"


def list_files(folder: Path, *, remedy: str = IMAGES_WANTED) -> dict[str, int]:
    """Regular files, relative to `folder`, with a number that links to one file have in common; 0 for a broken link.

    Sorted as strings, without hidden files and pipes. Links to folders are followed; one to its own folder is refused.
    """
    try:
        if not folder.is_dir():
            problem = "is a file, not a folder" if folder.exists() else "does not exist"
            raise DataError(f"{folder} {problem}", remedy=remedy)
        listed = dict(sorted(_walk(str(folder))))
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error}", remedy="make it readable, or copy it") from error
    if not listed:
        raise DataError(f"{printable(str(folder))} holds no files", remedy=remedy)
    return listed


def is_hidden(name: str) -> bool:
    """Whether a file or folder is one of an operating system's, or of a network drive's thumbnails."""
    return name.startswith(".") or name in _OF_SYSTEMS


def _walk(folder: str, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield each file below `folder`, its path behind `prefix`, with its number, see `list_files`."""
    for entry in [*os.scandir(folder)]:
        if is_hidden(entry.name):
            continue
        path = prefix + entry.name
        try:
            found = entry.stat()
        except OSError:  # a broken link
            yield path, 0
            continue
        if stat.S_ISREG(found.st_mode):
            yield path, hash((found.st_dev, found.st_ino))
        elif stat.S_ISDIR(found.st_mode):
            target = Path(entry.path).resolve() if entry.is_symlink() else None
            if target and any(above.resolve().is_relative_to(target) for above in Path(entry.path).parents):
                problem = f"{printable(entry.path)} is a link to a folder that it lies in"
                raise DataError(problem, remedy=f"remove it: rm {shlex.quote(entry.path)}")
            yield from _walk(entry.path, f"{path}/")


def read_image(path: Path | str, *, size: int) -> Tensor | str:
    """The image, uint8, (3, size, size), or one line on why there is none.

    It is turned upright as its EXIF orientation says, laid on white where it is transparent, cut to its central square
    and resized by antialiased bicubic interpolation. Of an animation the first frame counts.
    """
    with _only_bombs_warn():
        return _read_image(path, size)


def read_images(paths: Sequence[str], images: Tensor, *, num_threads: int) -> list[str | None]:
    """`read_image` of all `paths` into `images` (uint8, (N, 3, size, size)); of each None, or why there is none.

    `images` may be on the device "meta": then nothing is kept.
    """

    def read(row: int) -> str | None:
        image = _read_image(paths[row], images.shape[2])
        if isinstance(image, str):
            return image
        images[row].copy_(image)
        return None

    with _only_bombs_warn(), ThreadPool(num_threads) as pool:
        found = pool.imap(read, range(len(paths)), chunksize=_CHUNK)
        errors = [*tqdm(found, total=len(paths), unit=" pictures", disable=None)]
        pool.close()
        pool.join()
    return errors


@contextmanager
def _only_bombs_warn() -> Iterator[None]:
    """Make warnings of what may fill the memory errors; Pillow's others, such as on broken metadata, are no concern."""
    with warnings.catch_warnings():  # in the whole process, so no thread may do this
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _read_image(path: Path | str, size: int) -> Tensor | str:
    try:
        with Image.open(path, formats=FORMATS) as image:
            if problem := _unclear(image):
                return problem
            if not isinstance(image, TiffImageFile):  # its tags are read before, as loading it follows them
                image.load()
            with suppress(Exception):  # broken tags; what was read of them before stays with the image
                image.getexif().hide_offsets()
            # Otherwise Pillow raises on broken XMP, and where it writes tags anew for an image that it has turned.
            image.info = {name: value for name, value in image.info.items() if name == "transparency"}
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                white = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(white, upright.convert("RGBA"))
            square = ImageOps.fit(upright.convert("RGB"), (size, size), method=Image.Resampling.BICUBIC)
    except UnidentifiedImageError:
        return f"not an image ({', '.join(FORMATS)})"
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return f"larger than {Image.MAX_IMAGE_PIXELS} pixels"
    except Exception as error:  # decoders raise nearly anything on damaged data, even SyntaxError
        return getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error)}"
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def _unclear(image: Image.Image) -> str | None:
    """Why Pillow would read a file wrongly, or nobody can tell what it shows; None if neither is so."""
    tags: Mapping[int, Any] = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    stored = image.tile[0].args if isinstance(image, PngImageFile) else image.mode
    wrongs = (
        image.mode[0] in "IF",  # integers of more than 8 bits, and real numbers, are clipped at 255
        2 in tags.get(SAMPLEFORMAT, ()),  # signed bytes are read as unsigned ones
        max(tags.get(COLORMAP, [256])) < 256,  # a palette of bytes is taken for one of 16 bits: all black
        # A transparent value is compared with pixels that have been scaled.
        "transparency" in image.info and stored in ("L;2", "L;4", "RGB;16B"),
    )
    if any(wrongs):
        return f"{image.format} of mode {image.mode} would be read with other values: save it with 8 bits a channel"
    if tags.get(_SUBFILE_TYPE, 0) & 1:
        problem = "whose first page is a thumbnail"
    elif isinstance(image, TiffImageFile) and image.n_frames > 1:
        problem = f"of {image.n_frames} pages"
    elif tags and image.mode in ("RGBA", "RGBX", "RGBa"):  # the fourth may be infrared, often marked as transparency
        problem = "of four bands"
    else:
        return None
    return f"TIFF {problem}: save the picture that counts, in one page of grey or RGB"
