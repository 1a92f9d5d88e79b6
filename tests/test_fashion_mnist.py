import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import load, prepare, served, write_idx
from torchvision.datasets import FashionMNIST

from lit_cifar.data import fashion_mnist
from lit_cifar.errors import DataError

SIZES = {"train": 12, "test": 10}
PREFIX = {"train": "train", "test": "t10k"}


def write_raw(folder: Path) -> None:
    for split, size in SIZES.items():
        pixels = np.random.default_rng(size).integers(1, 256, (size, 28, 28), np.uint8)
        write_idx(folder / f"{PREFIX[split]}-images-idx3-ubyte", pixels)
        write_idx(folder / f"{PREFIX[split]}-labels-idx1-ubyte", np.arange(size, dtype=np.uint8) % 10)


@pytest.fixture
def small_sizes(monkeypatch):
    monkeypatch.setattr(fashion_mnist, "NUM_IMAGES", SIZES)


@pytest.fixture
def root(small_sizes, tmp_path):
    write_raw(tmp_path / "FashionMNIST" / "raw")
    return tmp_path


def refusal(root: Path, *, download: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        prepare("fashion_mnist", root, download=download)
    assert len(str(caught.value).splitlines()) <= 5
    return str(caught.value)


@pytest.mark.parametrize("split", ["train", "test"])
def test_grey_images_become_three_padded_channels(root, split):
    prepare("fashion_mnist", root, download=False)
    images = load("fashion_mnist", root, split=split)
    original = FashionMNIST(root, train=split == "train").data
    assert (images.images.dtype, tuple(images.images.shape)) == (torch.uint8, (SIZES[split], 3, 32, 32))
    assert images.images.is_contiguous()
    assert images.labels.tolist() == [i % 10 for i in range(SIZES[split])]
    for channel in images.images.unbind(1):
        assert torch.equal(channel[:, 2:30, 2:30], original)
        assert channel.sum() == original.sum()
    assert images.name == f"FashionMNIST {split}"


@pytest.mark.parametrize("file", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("kept_bytes", [0, 3, 15, 17])
def test_a_truncated_file(root, file, kept_bytes):
    path = root / "FashionMNIST" / "raw" / file
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert "incomplete or damaged" in refusal(root)


def test_a_missing_file(root):
    (root / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte").unlink()
    assert "incomplete or damaged" in refusal(root)


def test_a_label_out_of_range(root):
    write_idx(root / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte", np.full(12, 10, np.uint8))
    assert "a train label is 10" in refusal(root)


def test_official_sizes_are_required(root, monkeypatch):
    monkeypatch.undo()
    assert "not 60000 train images" in refusal(root)


def test_absent_and_no_download(tmp_path):
    message = refusal(tmp_path / "root", download=False)
    for remedy in ("--data.root=", "--data.download=true", "--data.dataset=synthetic"):
        assert remedy in message
    assert not (tmp_path / "root").exists()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A mirror of small files, whose hashes torchvision takes for the official ones."""
    write_raw(tmp_path / "site")
    resources = [
        (name, hashlib.md5((tmp_path / "site" / name).read_bytes()).hexdigest()) for name, _ in FashionMNIST.resources
    ]
    monkeypatch.setattr(FashionMNIST, "resources", resources)
    with served(tmp_path / "site") as address:
        monkeypatch.setattr(FashionMNIST, "mirrors", [f"{address}/"])
        yield tmp_path / "site"


def test_download(small_sizes, site, tmp_path):
    root = tmp_path / "root"
    prepare("fashion_mnist", root, download=True)
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"]
    assert len(load("fashion_mnist", root, split="test")) == 10


def test_a_failed_download_leaves_nothing(small_sizes, site, tmp_path):
    (site / FashionMNIST.resources[3][0]).write_bytes(b"something else")
    message = refusal(tmp_path / "root")
    assert "FashionMNIST cannot be downloaded" in message
    assert "--data.download=true" not in message
    assert "--data.dataset=synthetic" in message
    assert list((tmp_path / "root").iterdir()) == []
