import io
import os
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from lit_cifar.data.predict_files import FORMATS, read_folder
from lit_cifar.errors import DataError

CLASSES = ("a", "b")


def save(path, colour=(10, 20, 30), size=(40, 40), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)


def read(folder):
    return read_folder(folder, classes=CLASSES)


def only_image(folder):
    (image,) = read(folder).images.images
    return image


def colour_of(image):
    """The colour of an image of one colour."""
    assert (image == image[:, :1, :1]).all()
    return tuple(image[:, 0, 0].tolist())


def test_files_are_in_sorted_order_with_those_of_subfolders(tmp_path):
    for i, name in enumerate(["b.png", "a/z.png", "a.png", "B.png", "a/10.png", "a/9.png"]):
        save(tmp_path / name, colour=(i, 0, 0))
    found = read(tmp_path)
    assert [file.as_posix() for file in found.files] == ["B.png", "a.png", "a/10.png", "a/9.png", "a/z.png", "b.png"]
    assert found.images.images[:, 0, 0, 0].tolist() == [3, 2, 4, 5, 1, 0]
    assert found.errors == (None,) * 6


def test_the_images_are_an_image_set_without_labels(tmp_path):
    save(tmp_path / "a.png")
    save(tmp_path / "b.png")
    images = read(tmp_path).images
    assert (images.images.dtype, tuple(images.images.shape)) == (torch.uint8, (2, 3, 32, 32))
    assert (images.labels.dtype, images.labels.tolist()) == (torch.int64, [-1, -1])
    assert images.classes == CLASSES
    assert images.name == str(tmp_path)


def test_unreadable_files_are_listed_with_the_reason(tmp_path):
    save(tmp_path / "good.png", colour=(1, 2, 3))
    save(tmp_path / "last.png", colour=(4, 5, 6))
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(buffer, "PNG")
    (tmp_path / "cut.png").write_bytes(buffer.getvalue()[:2000])
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("not an image")
    found = read(tmp_path)
    assert [file.name for file in found.files] == [
        "cut.png",
        "empty.jpg",
        "gone.png",
        "good.png",
        "last.png",
        "notes.txt",
    ]
    reasons = dict(zip([file.name for file in found.files], found.errors, strict=True))
    assert reasons["good.png"] is None
    assert reasons["last.png"] is None
    assert reasons["notes.txt"] == reasons["empty.jpg"] == f"not an image ({', '.join(FORMATS)})"
    assert reasons["gone.png"] == "No such file or directory"
    assert "truncated" in reasons["cut.png"]
    assert found.images.images[:, :, 0, 0].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(("suffix", "at", "value"), [("png", 11, 0), ("bmp", 30, 1), ("ppm", 3, 0)])
def test_damage_for_which_pillow_raises_other_than_oserror(tmp_path, suffix, at, value):
    save(tmp_path / "good.png")
    save(tmp_path / f"bad.{suffix}", size=(20, 20))
    content = bytearray((tmp_path / f"bad.{suffix}").read_bytes())
    content[at] = value
    (tmp_path / f"bad.{suffix}").write_bytes(content)
    error, none = read(tmp_path).errors
    assert error.startswith("ValueError: ")
    assert none is None


@pytest.mark.parametrize("side", [12_000, 60_000])
def test_an_image_that_would_fill_the_memory_is_not_decoded(tmp_path, side):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    save(tmp_path / "good.png")
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    assert read(tmp_path).errors == (f"larger than {Image.MAX_IMAGE_PIXELS} pixels", None)


def test_hidden_files_folders_and_pipes_are_left_out(tmp_path):
    save(tmp_path / "seen.png")
    save(tmp_path / ".hidden.png")
    save(tmp_path / ".cache" / "thumbnail.png")
    os.mkfifo(tmp_path / "pipe.png")
    assert [file.name for file in read(tmp_path).files] == ["seen.png"]


def test_the_central_square_is_taken(tmp_path):
    pixels = np.zeros((64, 192, 3), np.uint8)
    pixels[:, 64:128] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    image = only_image(tmp_path)
    assert (image[:, :, 2:-2].int() - 200).abs().max() <= 2  # interpolation reaches two pixels over the edge
    assert image.min() > 150


def test_shrinking_is_antialiased(tmp_path):
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    assert (only_image(tmp_path).int() - 127).abs().max() <= 8


def test_an_image_of_the_right_size_is_unchanged(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "exact.png")
    assert torch.equal(only_image(tmp_path), torch.from_numpy(pixels).permute(2, 0, 1))


def test_exif_orientation_is_honoured(tmp_path):
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
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
def test_every_mode_becomes_rgb(tmp_path, mode, colour, seen):
    save(tmp_path / "image.png", mode=mode, colour=colour)
    assert colour_of(only_image(tmp_path)) == seen


def test_the_first_frame_of_an_animation_counts(tmp_path):
    frames = [Image.new("RGB", (32, 32), colour) for colour in ((250, 0, 0), (0, 250, 0))]
    frames[0].save(tmp_path / "moving.png", save_all=True, append_images=frames[1:])
    assert colour_of(only_image(tmp_path)) == (250, 0, 0)


def test_folders_that_cannot_be_read(tmp_path):
    (tmp_path / "file.png").write_bytes(b"")
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    for name, problem in (("nowhere", "does not exist"), ("file.png", "is a file"), ("empty", "holds no files")):
        with pytest.raises(DataError, match=f"{name} {problem}"):
            read(tmp_path / name)


def test_a_folder_without_any_image(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match=r"none of the 2 files in .* the first is a.txt: not an image"):
        read(tmp_path)


def test_a_folder_below_the_home_folder(tmp_path, monkeypatch):
    save(tmp_path / "images" / "a.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read(type(tmp_path)("~/images")).images) == 1
