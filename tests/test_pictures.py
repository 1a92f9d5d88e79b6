"""Pictures to classify, as they lie in a folder; `test_own_network` has those to train on."""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lit_cifar.data.pictures import FORMATS, FolderImages, read_folder
from lit_cifar.errors import DataError

CLASSES = ("a", "b")


def save(path: Path, colour: Any = (10, 20, 30), size: tuple[int, int] = (40, 40), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def read(folder: Path) -> FolderImages:
    return read_folder(folder, classes=CLASSES)


def only_image(folder: Path) -> Tensor:
    (image,) = read(folder).images.images
    return image


def test_files_are_in_sorted_order_with_those_of_subfolders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, name in enumerate(["b.png", "a/z.png", "a.png", "B.png", "a/10.png", "a/9.png"]):
        save(tmp_path / "images" / name, colour=(i, 0, 0))
    monkeypatch.setenv("HOME", str(tmp_path))
    found = read(Path("~/images"))
    assert [file.as_posix() for file in found.files] == ["B.png", "a.png", "a/10.png", "a/9.png", "a/z.png", "b.png"]
    assert found.images.images[:, 0, 0, 0].tolist() == [3, 2, 4, 5, 1, 0]
    assert found.errors == (None,) * 6
    assert (found.images.images.dtype, tuple(found.images.images.shape)) == (torch.uint8, (6, 3, 32, 32))
    assert (found.images.labels.dtype, found.images.labels.tolist()) == (torch.int64, [-1] * 6)
    assert found.images.classes == CLASSES


def bomb(side: int) -> bytes:
    """A small PNG of `side` x `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


def test_unreadable_files_are_listed_with_the_reason(tmp_path: Path) -> None:
    save(tmp_path / "good.png", colour=(1, 2, 3))
    save(tmp_path / "last.png", colour=(4, 5, 6))
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(buffer, "PNG")
    (tmp_path / "cut.png").write_bytes(buffer.getvalue()[:2000])
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("not an image")
    # Where Pillow only warns, and where it refuses by itself; neither is decoded.
    (tmp_path / "large.png").write_bytes(bomb(12_000))
    (tmp_path / "larger.png").write_bytes(bomb(60_000))
    # Left out: what is hidden, and what would block.
    save(tmp_path / ".hidden.png")
    save(tmp_path / ".cache" / "thumbnail.png")
    os.mkfifo(tmp_path / "pipe.png")
    found = read(tmp_path)
    reasons = dict(zip([file.name for file in found.files], found.errors, strict=True))
    no_image, too_large = f"not an image ({', '.join(FORMATS)})", f"larger than {Image.MAX_IMAGE_PIXELS} pixels"
    assert "truncated" in (reasons.pop("cut.png") or "")
    assert reasons == {
        "empty.jpg": no_image,
        "gone.png": "No such file or directory",
        "good.png": None,
        "large.png": too_large,
        "larger.png": too_large,
        "last.png": None,
        "notes.txt": no_image,
    }
    assert found.images.images[:, :, 0, 0].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(("suffix", "at", "value"), [("png", 11, 0), ("bmp", 30, 1), ("ppm", 3, 0)])
def test_damage_for_which_pillow_raises_other_than_oserror(tmp_path: Path, suffix: str, at: int, value: int) -> None:
    save(tmp_path / "good.png")
    save(tmp_path / f"bad.{suffix}", size=(20, 20))
    content = bytearray((tmp_path / f"bad.{suffix}").read_bytes())
    content[at] = value
    (tmp_path / f"bad.{suffix}").write_bytes(content)
    error, none = read(tmp_path).errors
    assert (error or "").startswith("ValueError: ")
    assert none is None


def test_the_central_square_is_resized_without_aliasing(tmp_path: Path) -> None:
    wide, stripes = np.zeros((64, 192, 3), np.uint8), np.zeros((256, 256, 3), np.uint8)
    wide[:, 64:128] = 200
    stripes[:, ::2] = 255
    exact = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    for name, pixels in (("a", wide), ("b", stripes), ("c", exact)):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    of_wide, of_stripes, of_exact = read(tmp_path).images.images
    assert (of_wide[:, :, 2:-2].int() - 200).abs().max() <= 2  # interpolation reaches two pixels over the edge
    assert of_wide.min() > 150
    assert (of_stripes.int() - 127).abs().max() <= 8
    assert torch.equal(of_exact, torch.from_numpy(exact).permute(2, 0, 1))


def test_exif_orientation_is_honoured_and_of_an_animation_the_first_frame_counts(tmp_path: Path) -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    turned = Image.fromarray(pixels)
    turned.save(tmp_path / "turned.png", exif=exif, save_all=True, append_images=[Image.new("RGB", (32, 32))])
    image = only_image(tmp_path)
    assert (image[:, :, 16:] == 255).all()
    assert (image[:, :, :16] == 0).all()


@pytest.mark.parametrize(
    ("mode", "colour", "seen"),
    [
        ("L", 77, (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
        ("P", 0, (0, 0, 0)),
        ("I;16", 0x8000, (128, 128, 128)),
        ("RGBA", (9, 8, 7, 255), (9, 8, 7)),
        ("RGBA", (9, 8, 7, 0), (255, 255, 255)),
        ("LA", (0, 0), (255, 255, 255)),
    ],
)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str, colour: Any, seen: tuple[int, ...]) -> None:
    save(tmp_path / "image.png", mode=mode, colour=colour)
    assert (only_image(tmp_path) == torch.tensor(seen)[:, None, None]).all()


def test_folders_without_any_image(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    problems = {"nowhere": "does not exist", "texts/a.txt": "is a file", "empty": "holds no files"}
    for name, problem in (problems | {"texts": "can be read as an image; the first is a.txt: not an image"}).items():
        with pytest.raises(DataError, match=f"{name} {problem}"):
            read(tmp_path / name)
