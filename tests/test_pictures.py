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

from lit_cifar.data.images import ImageSet
from lit_cifar.data.picture_files import FORMATS, list_files, read_image
from lit_cifar.data.pictures import EncodedImages, read_folder
from lit_cifar.errors import DataError

CLASSES = ("a", "b")


def save(path: Path, colour: Any = (10, 20, 30), size: tuple[int, int] = (40, 40), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def read(folder: Path) -> tuple[dict[str, str | None], ImageSet]:
    return read_folder(folder, classes=CLASSES)


def only_image(folder: Path) -> Tensor:
    _, images = read(folder)
    return images.images[0]


def test_files_are_in_sorted_order_with_those_of_subfolders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, name in enumerate(["b.png", "a/z.png", "a.png", "B.png", "a/10.png", "a/9.png"]):
        save(tmp_path / "images" / name, colour=(i, 0, 0))
    monkeypatch.setenv("HOME", str(tmp_path))
    files, found = read(Path("~/images"))
    names = ["B.png", "a.png", "a/10.png", "a/9.png", "a/z.png", "b.png"]
    assert [*files.items()] == [(name, None) for name in names]
    assert found.images[:, 0, 0, 0].tolist() == [3, 2, 4, 5, 1, 0]
    assert (found.images.dtype, tuple(found.images.shape)) == (torch.uint8, (6, 3, 32, 32))
    assert (found.labels.dtype, found.labels.tolist()) == (torch.int64, [-1] * 6)
    assert found.classes == CLASSES


def linked(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def test_linked_folders_are_followed(tmp_path: Path) -> None:
    cats = tmp_path / "data" / "cat"
    for name in ("data/cat/0.png", "data/cat/deep/1.png", "data/dog/2.png", "store/3.png", "store/in/4.png"):
        save(tmp_path / name)
    for name, target in {
        "2024": "../../store",
        "also/deeper": "../../../store/in",
        "file.png": "../dog/2.png",
        "of_link": "2024/in",
        "endless": "endless",
        "gone": "../nowhere",
    }.items():
        linked(cats / name, target)
    expected = "0.png 2024/3.png 2024/in/4.png also/deeper/4.png deep/1.png endless file.png gone of_link/4.png"
    found = list_files(cats)
    assert " ".join(found) == expected
    assert found["endless"] == found["gone"] == 0  # named as files that cannot be read
    linked(tmp_path / "by_link", "data/dog")
    assert list(list_files(tmp_path / "by_link")) == ["2.png"]


@pytest.mark.parametrize(
    ("name", "target"),
    [("itself", "."), ("above", ".."), ("deep/two_above", "../../.."), ("store/back", "../cat"), ("store/up", "..")],
)
def test_a_circle_of_links_is_refused(name: str, target: str, tmp_path: Path) -> None:
    """It would never end, or have pictures of the folders around this one."""
    save(tmp_path / "cat" / "deep" / "0.png")
    linked(tmp_path / "cat" / "store", "../store")
    linked(tmp_path / ("" if "store" in name else "cat") / name, target)
    with pytest.raises(DataError, match=f"cat/{name} is a link to a folder that it lies in\nremove it: rm "):
        list_files(tmp_path / "cat")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(side: int, bits: int, colours: int, data: bytes, transparent: bytes = b"") -> bytes:
    """A PNG of `side` x `side` pixels; `colours` is the number of their kind, 0 for grey."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, bits, colours, 0, 0, 0))
    header += chunk(b"tRNS", transparent) if transparent else b""
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def test_unreadable_files_are_listed_with_the_reason(tmp_path: Path) -> None:
    save(tmp_path / "good.png", colour=(1, 2, 3))
    save(tmp_path / "last.png", colour=(4, 5, 6))
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(buffer, "PNG")
    (tmp_path / "cut.png").write_bytes(buffer.getvalue()[:2000])
    save(tmp_path / "bad.bmp", size=(20, 20))
    content = bytearray((tmp_path / "bad.bmp").read_bytes())
    content[30] = 1  # the wrong compression
    (tmp_path / "bad.bmp").write_bytes(content)
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("not an image")
    # Where Pillow only warns, and where it refuses by itself; neither is decoded.
    (tmp_path / "large.png").write_bytes(png(12_000, 8, 2, b"\0" * 1000))
    (tmp_path / "larger.png").write_bytes(png(60_000, 8, 2, b"\0" * 1000))
    # Left out: what is hidden, and what would block.
    save(tmp_path / ".hidden.png")
    save(tmp_path / ".cache" / "thumbnail.png")
    os.mkfifo(tmp_path / "pipe.png")
    files, found = read(tmp_path)
    reasons = {**files}
    no_image, too_large = f"not an image ({', '.join(FORMATS)})", f"larger than {Image.MAX_IMAGE_PIXELS} pixels"
    assert "truncated" in (reasons.pop("cut.png") or "")
    assert (reasons.pop("bad.bmp") or "").startswith("ValueError: ")  # Pillow raises more than OSError
    expected = {"empty.jpg": no_image, "notes.txt": no_image, "large.png": too_large, "larger.png": too_large}
    assert reasons == expected | {"gone.png": "No such file or directory", "good.png": None, "last.png": None}
    assert found.images[:, :, 0, 0].tolist() == [[1, 2, 3], [4, 5, 6]]
    again, needed = read_folder(tmp_path, classes=CLASSES, limit_gb=0)
    assert again == files
    assert isinstance(needed, EncodedImages)
    assert needed.gather(torch.arange(2)).equal(found.images)


def test_the_central_square_is_resized_without_aliasing(tmp_path: Path) -> None:
    wide, stripes = np.zeros((64, 192, 3), np.uint8), np.zeros((256, 256, 3), np.uint8)
    wide[:, 64:128] = 200
    stripes[:, ::2] = 255
    exact = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    for name, pixels in (("a", wide), ("b", stripes), ("c", exact)):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    of_wide, of_stripes, of_exact = read(tmp_path)[1].images
    assert (of_wide[:, :, 2:-2].int() - 200).abs().max() <= 2  # interpolation reaches two pixels over the edge
    assert of_wide.min() > 150
    assert (of_stripes.int() - 127).abs().max() <= 8
    assert torch.equal(of_exact, torch.from_numpy(exact).permute(2, 0, 1))


# An orientation, to be turned by 90 degrees clockwise, and a width that is a text.
EXIF = struct.pack("<6s4sIHHHIIHHI4s", b"Exif", b"II*", 8, 2, 274, 3, 1, 6, 256, 2, 4, b"abc")


@pytest.mark.parametrize("exif", [EXIF, EXIF[:12], b"Exif\0\0JUNKJUNK"], ids=["whole", "cut", "junk"])
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_what_can_be_read_of_exif_is_honoured(kind: str, exif: bytes, tmp_path: Path) -> None:
    """Of an animation the first frame counts."""
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 255
    frames: dict[str, Any] = {} if kind == "jpeg" else {"save_all": True, "append_images": [Image.new("RGB", (32, 32))]}
    Image.fromarray(pixels).save(tmp_path / f"image.{kind}", exif=exif, dpi=(72, 72), **frames)
    expected = torch.from_numpy(np.rot90(pixels, -1).copy() if exif is EXIF else pixels).permute(2, 0, 1)
    assert (only_image(tmp_path) > 127).equal(expected > 127)


@pytest.mark.parametrize(
    ("mode", "colour", "seen"),
    [
        ("L", 77, (77, 77, 77)),
        ("RGBA", (9, 8, 7, 255), (9, 8, 7)),
        ("RGBA", (9, 8, 7, 0), (255, 255, 255)),
        ("LA", (0, 0), (255, 255, 255)),
    ],
)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str, colour: Any, seen: tuple[int, ...]) -> None:
    save(tmp_path / "image.png", mode=mode, colour=colour)
    assert (only_image(tmp_path) == torch.tensor(seen)[:, None, None]).all()


# From left to right in each row of a picture, and what they should become.
RAMP = np.arange(32, dtype=np.uint16) * 2113
SCALED = (RAMP >> 8).astype(np.uint8)


def rows_of(values: Any, kind: str) -> bytes:
    return np.tile(np.asarray(values).astype(kind), 32).tobytes()


def png_rows(values: Any, kind: str) -> bytes:
    return (b"\0" + np.asarray(values).astype(kind).tobytes()) * 32


def tiff(data: bytes, bits: int = 16, **tags: tuple[int, ...]) -> bytes:
    """32 x 32 grey pixels; `tags` are others than those of integers where 0 is black."""
    numbers = {"subfile": 254, "photometric": 262, "samples": 277, "map": 320, "extra": 338, "format": 339, "xmp": 700}
    found = {256: (32,), 257: (32,), 258: (bits,), 259: (1,), 262: (1,), 273: (8,), 278: (32,), 279: (len(data),)}
    found |= {numbers[name]: value for name, value in tags.items()}
    entries, more, behind = b"", b"", 8 + len(data) + 2 + 12 * len(found) + 4
    for number in sorted(found):
        value = struct.pack(f"<{len(found[number])}H", *found[number])
        if len(value) > 4:
            value, more = struct.pack("<I", behind + len(more)), more + value
        entries += struct.pack("<HHI", number, 3, len(found[number])) + value.ljust(4, b"\0")
    directory = struct.pack("<H", len(found)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + directory + more


def two_pages() -> bytes:
    pages, file = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")], io.BytesIO()
    pages[0].save(file, "TIFF", save_all=True, append_images=pages[1:])
    return file.getvalue()


def colours(values: Any) -> Any:
    return np.repeat(values, 3)


BYTES = rows_of(SCALED, "u1")
WRONG = "would be read with other values: save it with 8 bits a channel"
RANGES = {
    "16-bit PNG": (png(32, 16, 0, png_rows(RAMP, ">u2")), f"PNG of mode I;16 {WRONG}"),
    "16-bit PNG of colours": (png(32, 16, 2, png_rows(colours(RAMP), ">u2")), SCALED),
    "transparent 16-bit PNG": (png(32, 16, 2, png_rows(colours(RAMP), ">u2"), bytes(6)), f"PNG of mode RGB {WRONG}"),
    "8-bit PNG, a colour is transparent": (
        png(32, 8, 2, png_rows(colours(SCALED), "u1"), colours(SCALED[9]).astype(">u2").tobytes()),
        np.where(np.arange(32) == 9, 255, SCALED),
    ),
    "transparent 4-bit PNG": (png(32, 4, 0, bytes(17 * 32), bytes(2)), f"PNG of mode L {WRONG}"),
    "16-bit PGM": (b"P5 32 32 65535\n" + rows_of(RAMP, ">u2"), f"PPM of mode I {WRONG}"),
    "16-bit PPM": (b"P6 32 32 65535\n" + rows_of(colours(RAMP), ">u2"), SCALED),
    "8-bit TIFF, 0 is white": (tiff(BYTES, 8, photometric=(0,)), 255 - SCALED),
    "8-bit TIFF with broken XMP": (tiff(BYTES, 8, xmp=(1,)), SCALED),
    "16-bit TIFF": (tiff(rows_of(RAMP, "<u2")), f"TIFF of mode I;16 {WRONG}"),
    "TIFF, 8-bit palette": (tiff(BYTES, 8, photometric=(3,), map=(*range(256),) * 3), f"TIFF of mode P {WRONG}"),
    "TIFF, 16-bit palette": (tiff(BYTES, 8, photometric=(3,), map=(*range(0, 65536, 257),) * 3), SCALED),
    "signed 8-bit TIFF": (tiff(rows_of(SCALED >> 1, "i1"), 8, format=(2,)), f"TIFF of mode L {WRONG}"),
    "real TIFF": (tiff(rows_of(RAMP / 65535, "<f4"), 32, format=(3,)), f"TIFF of mode F {WRONG}"),
    "four bands": (tiff(BYTES * 4, 8, photometric=(2,), samples=(4,), extra=(2,)), "TIFF of four"),
    "a thumbnail": (tiff(BYTES, 8, subfile=(1,)), "TIFF whose first page is a thumbnail"),
    "two pages": (two_pages(), "TIFF of 2 pages: save the picture that counts"),
}


@pytest.mark.parametrize("kind", RANGES)
def test_what_pillow_would_read_wrongly_is_refused(kind: str, tmp_path: Path) -> None:
    """Each would become a constant or another picture if Pillow alone made bytes of it."""
    content, expected = RANGES[kind]
    (tmp_path / "picture").write_bytes(content)
    found = read_image(tmp_path / "picture", size=32)
    if isinstance(expected, str):
        assert isinstance(found, str)
        assert expected in found
        return
    assert isinstance(found, Tensor), found
    assert (found.int() - torch.from_numpy(np.tile(expected.astype(np.int32), (3, 32, 1)))).abs().max() <= 1


def test_folders_without_any_image(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    problems = {"nowhere": "does not exist", "texts/a.txt": "is a file", "empty": "holds no files"}
    for name, problem in (problems | {"texts": "can be read as an image; the first is a.txt: not an image"}).items():
        with pytest.raises(DataError, match=f"{name} {problem}"):
            read(tmp_path / name)
