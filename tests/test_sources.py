import hashlib
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import cifar10_records, load, pack, prepare, write_binary_edition
from torchvision.datasets import CIFAR10

from lit_cifar.data import CIFAR10DataModule, cifar10, fashion_mnist
from lit_cifar.data.dataset import Dataset
from lit_cifar.data.download import Archive
from lit_cifar.data.sources import open_dataset
from lit_cifar.errors import ConfigError, DataError

PER_FILE = 20
REAL_ROOT = Path(os.environ.get("LIT_CIFAR_DATA", "data"))


def dataset_info(name: str) -> Dataset:
    return open_dataset(name, "nowhere")


@pytest.fixture(autouse=True)
def no_real_download(monkeypatch):
    archive = Archive(url="http://127.0.0.1:9/cifar.tar.gz", md5="", folder="cifar-10-batches-bin")
    monkeypatch.setattr(cifar10, "CIFAR10_BINARY", archive)


@pytest.fixture
def small_files(monkeypatch):
    """Files of 20 records count as complete."""
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", PER_FILE)


@pytest.fixture
def binary_root(small_files, tmp_path):
    write_binary_edition(tmp_path, records_per_file=PER_FILE)
    return tmp_path


@pytest.fixture
def python_root(monkeypatch, tmp_path):
    """A small python edition whose hashes torchvision takes for the official ones."""
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()

    def write(name: str, content: object) -> str:
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    def write_batch(name: str, seed: int) -> list[str]:
        records = cifar10_records(PER_FILE, seed=seed)
        return [name, write(name, {"data": records[:, 1:], "labels": records[:, 0].tolist()})]

    monkeypatch.setattr(CIFAR10, "train_list", [write_batch(f"data_batch_{i + 1}", i) for i in range(5)])
    monkeypatch.setattr(CIFAR10, "test_list", [write_batch("test_batch", 5)])
    meta = {"filename": "batches.meta", "key": "label_names"}
    md5 = write("batches.meta", {"label_names": list(cifar10.CLASSES)})
    monkeypatch.setattr(CIFAR10, "meta", {**meta, "md5": md5})
    return tmp_path


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(DataError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert len(message.splitlines()) <= 5
    assert message == f"{caught.value.problem}\n{caught.value.remedy}"
    return message


def refused_by_both(root: Path) -> str:
    """The message, which `prepare` and `load` must agree on."""
    message = refusal(prepare, "cifar10", root, download=True)
    assert message == refusal(load, "cifar10", root, split="train")
    return message


def assert_is_small_cifar10(root: Path) -> None:
    for split, seeds in (("train", range(5)), ("test", [5])):
        records = np.concatenate([cifar10_records(PER_FILE, seed=seed) for seed in seeds])
        images = load("cifar10", root, split=split)
        assert images.images.dtype == torch.uint8
        assert images.images.is_contiguous()
        assert images.labels.dtype == torch.int64
        assert images.images.tolist() == records[:, 1:].reshape(-1, 3, 32, 32).tolist()
        assert images.labels.tolist() == records[:, 0].tolist()
        assert images.classes == cifar10.CLASSES
        assert images.name == f"CIFAR-10 {split}"


def test_the_binary_edition_is_read_in_order(binary_root):
    prepare("cifar10", binary_root, download=False)
    assert_is_small_cifar10(binary_root)


def test_the_python_edition_is_read_in_order(python_root):
    prepare("cifar10", python_root, download=False)
    assert_is_small_cifar10(python_root)


def test_of_both_editions_the_binary_one_is_read(binary_root, python_root):
    assert binary_root == python_root
    for path in (python_root / CIFAR10.base_folder).iterdir():
        path.write_bytes(b"garbage")
    prepare("cifar10", python_root, download=False)
    assert_is_small_cifar10(python_root)


def test_a_changed_pickle_is_never_opened(python_root, monkeypatch):
    def opened(*args: object, **kwargs: object) -> None:
        pytest.fail("unpickled before the hash was checked")

    path = python_root / CIFAR10.base_folder / "data_batch_5"
    path.write_bytes(path.read_bytes() + b" ")
    monkeypatch.setattr(pickle, "load", opened)
    assert f"{path.parent} is incomplete, or differs from the official files by md5" in refused_by_both(python_root)


def test_an_incomplete_python_edition(python_root):
    (python_root / CIFAR10.base_folder / "test_batch").unlink()
    assert "is incomplete" in refused_by_both(python_root)


def records_with(old: int | None, label: int) -> bytes:
    """The records of a file whose record 7, or whose class `old`, has another label."""
    records = cifar10_records(PER_FILE, seed=2)
    records[slice(7, 8) if old is None else records[:, 0] == old, 0] = label
    return records.tobytes()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("data_batch_4.bin", None, "{path} cannot be read: No such file"),
        ("data_batch_2.bin", bytes(PER_FILE * 3073 - 1), f"{{path}} holds {PER_FILE * 3073 - 1} bytes, not"),
        ("data_batch_3.bin", records_with(None, 10), "{path}: record 7 has label 10; CIFAR-10's are 0 to 9"),
        ("data_batch_3.bin", records_with(3, 4), "holds 8 train images of class cat; CIFAR-10 has 10 of each"),
    ],
    ids=["missing", "too short", "no such label", "too few of a class"],
)
def test_a_damaged_file_is_not_replaced_by_the_python_edition(binary_root, python_root, name, content, words):
    path = binary_root / "cifar-10-batches-bin" / name
    path.unlink() if content is None else path.write_bytes(content)
    message = refused_by_both(python_root)
    assert words.format(path=path) in message
    assert "--data.dataset=synthetic" in message


@pytest.mark.parametrize("target", [None, "not-mounted"])
def test_an_empty_folder_and_a_link_to_nowhere_are_not_replaced_by_a_download(small_files, tmp_path, target):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir() if target is None else folder.symlink_to(tmp_path / target)
    assert "data_batch_1.bin cannot be read: No such file" in refused_by_both(tmp_path)


def test_damaged_test_files_are_found_before_training(binary_root):
    (binary_root / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"")
    assert "test_batch.bin holds 0 bytes" in refusal(prepare, "cifar10", binary_root, download=False)


def test_official_sizes_are_required(tmp_path):
    write_binary_edition(tmp_path, records_per_file=PER_FILE)
    assert "not 30730000 (10000 records of 3073)" in refused_by_both(tmp_path)


@pytest.mark.parametrize("download", [True, False])
def test_absent_data_name_three_remedies_and_no_substitute(tmp_path, download):
    message = refusal(prepare, "cifar10", tmp_path / "root", download=download)
    for remedy in ("--data.root=", "--data.dataset=synthetic"):
        assert remedy in message
    assert ("--data.download=true" in message) != download
    assert "there is no CIFAR-10" in refusal(load, "cifar10", tmp_path / "root", split="test")


def test_an_archive_in_root_is_unpacked_and_checked(small_files, tmp_path, monkeypatch):
    folder = write_binary_edition(tmp_path / "original", records_per_file=PER_FILE)
    archive = pack(folder, tmp_path / "cifar.tar.gz")
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(cifar10, "CIFAR10_BINARY", Archive(url=f"x/{archive.name}", md5=md5, folder=folder.name))
    prepare("cifar10", tmp_path, download=False)
    assert_is_small_cifar10(tmp_path)
    before = (tmp_path / folder.name).stat().st_mtime_ns
    prepare("cifar10", tmp_path, download=True)
    assert (tmp_path / folder.name).stat().st_mtime_ns == before


def test_a_root_below_the_home_folder(binary_root, monkeypatch):
    monkeypatch.setenv("HOME", str(binary_root.parent))
    root = Path("~") / binary_root.name
    prepare("cifar10", root, download=False)
    assert_is_small_cifar10(root)


def test_the_first_images(binary_root):
    images = load("cifar10", binary_root, split="train", num_images=7)
    whole = load("cifar10", binary_root, split="train")
    assert torch.equal(images.images, whole.images[:7])
    assert torch.equal(images.labels, whole.labels[:7])
    assert images.images.untyped_storage().nbytes() == 7 * 3072
    assert images.name == "CIFAR-10 train (first 7 images)"


@pytest.mark.parametrize("num_images", [0, -1, PER_FILE + 1])
def test_more_images_than_there_are(binary_root, num_images):
    with pytest.raises(ConfigError, match=f"{num_images} test images asked of CIFAR-10, which has {PER_FILE}"):
        load("cifar10", binary_root, split="test", num_images=num_images)


@pytest.mark.parametrize(("num_train", "held_out"), [(None, 5000), (50_000, 5000), (600, 60), (9, 0)])
def test_the_default_holds_out_at_most_a_tenth(num_train: int | None, held_out: int) -> None:
    assert CIFAR10DataModule(dataset="synthetic", num_train=num_train).val_size == held_out


def test_data_are_read_ahead_once_and_only_if_they_are_there(small_files, tmp_path):
    data = CIFAR10DataModule(root=tmp_path, val_size=10)
    data.read_ahead("fit")
    assert data.sets == {}
    folder = write_binary_edition(tmp_path, records_per_file=PER_FILE)
    data.read_ahead("fit")
    read = data.sets["train"]
    shutil.rmtree(folder)
    data.setup("fit")
    assert data.sets["train"] is read


def test_the_synthetic_set_says_so_and_needs_no_root(tmp_path):
    prepare("synthetic", tmp_path / "nowhere", download=True)
    images = load("synthetic", tmp_path / "nowhere", split="test", num_images=50, seed=2)
    assert images.name == "synthetic test (50 drawn images)"
    assert len(images) == 50
    assert not torch.equal(images.images, load("synthetic", tmp_path, split="test", num_images=50, seed=3).images)
    assert not (tmp_path / "nowhere").exists()


def test_an_unknown_name_lists_the_known(tmp_path):
    for function in (lambda: dataset_info("mnist"), lambda: prepare("mnist", tmp_path, download=True)):
        with pytest.raises(ConfigError, match="'mnist'\nchoose one of cifar10, fashion_mnist, synthetic"):
            function()


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist", "synthetic"])
def test_every_data_set_has_ten_classes_and_three_channels(name):
    info = dataset_info(name)
    assert len(set(info.classes)) == 10
    assert len(info.mean) == len(info.std) == 3


def test_statistics_of_fashion_mnist_follow_from_the_published_ones():
    share, mean, std = (28 / 32) ** 2, 0.28604, 0.35302
    padded_std = (share * (std**2 + mean**2) - (share * mean) ** 2) ** 0.5
    info = dataset_info("fashion_mnist")
    assert info.mean == pytest.approx([share * mean] * 3, abs=1e-5)
    assert info.std == pytest.approx([padded_std] * 3, abs=1e-5)
    assert fashion_mnist.CLASSES[9] == "Ankle boot"


def test_the_real_cifar10():
    if not (REAL_ROOT / "cifar-10-batches-bin").is_dir():
        pytest.skip(f"needs CIFAR-10's binary edition in {REAL_ROOT}; LIT_CIFAR_DATA names another folder")
    prepare("cifar10", REAL_ROOT, download=False)
    train, test = (load("cifar10", REAL_ROOT, split=split) for split in ("train", "test"))
    assert torch.bincount(train.labels).tolist() == [5000] * 10
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    info, num_pixels = dataset_info("cifar10"), 50_000 * 32 * 32
    mean = train.images.sum((0, 2, 3)) / (255.0 * num_pixels)
    square = sum(part.float().square().sum((0, 2, 3)).double() for part in train.images.split(2000))
    std = (square / (255.0**2 * num_pixels) - mean.double().square()).sqrt()
    torch.testing.assert_close(mean.double(), torch.tensor(info.mean).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(std, torch.tensor(info.std).double(), atol=1e-5, rtol=0)
