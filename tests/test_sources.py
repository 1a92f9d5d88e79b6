"""The data sets as they lie on a disk, and how they get there; and the one that is drawn by code."""

import hashlib
import http.server
import os
import shutil
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import cifar10_records, pack, served, write_binary_edition, write_python_edition
from torchvision.datasets import CIFAR10, CIFAR100

from lit_cifar.data import CIFAR10DataModule, cifar10, download
from lit_cifar.data.cifar10 import Cifar10, Cifar100
from lit_cifar.data.dataset import open_dataset
from lit_cifar.data.download import installing
from lit_cifar.data.synthetic import BLOCK, CLASSES, Synthetic, draw
from lit_cifar.errors import ConfigError, DataError

PER_FILE = 20
REAL_ROOT = Path(os.environ.get("LIT_CIFAR_DATA", "data"))
NOWHERE = "http://127.0.0.1:9/small.tar.gz"  # at the discard port nothing listens


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 20 records count as complete, and nothing is downloaded from elsewhere. `publish` may set the hash."""
    monkeypatch.setattr(cifar10, "NUM_IMAGES", {"train": 5 * PER_FILE, "test": PER_FILE})
    monkeypatch.setattr(Cifar10, "url", NOWHERE)
    monkeypatch.setattr(Cifar10, "md5", Cifar10.md5)


@pytest.fixture
def binary_root(tmp_path: Path) -> Path:
    write_binary_edition(tmp_path, records_per_file=PER_FILE)
    return tmp_path


@pytest.fixture
def python_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    contents: dict[str, object] = {"batches.meta": {"label_names": list(cifar10.CLASSES)}}
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        records = cifar10_records(PER_FILE, seed=seed)
        contents[name] = {"data": records[:, 1:], "labels": records[:, 0].tolist()}
    write_python_edition(tmp_path, CIFAR10, contents, monkeypatch)
    return tmp_path


def refusal(root: Path, name: str = "cifar10", *, may_download: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(name, root).prepare(download=may_download)
    assert len(str(caught.value).splitlines()) <= 5
    return str(caught.value)


def refused_by_both(root: Path) -> str:
    """The message, which `prepare` and `load` must agree on."""
    message = refusal(root)
    with pytest.raises(DataError) as caught:
        open_dataset("cifar10", root).load("train")
    assert message == str(caught.value)
    return message


def assert_is_small_cifar10(root: Path) -> None:
    open_dataset("cifar10", root).prepare(download=False)
    for split, seeds in (("train", range(5)), ("test", [5])):
        records = np.concatenate([cifar10_records(PER_FILE, seed=seed) for seed in seeds])
        images = open_dataset("cifar10", root).load(split)
        assert (images.images.dtype, images.labels.dtype) == (torch.uint8, torch.int64)
        assert images.images.is_contiguous()
        assert images.images.tolist() == records[:, 1:].reshape(-1, 3, 32, 32).tolist()
        assert images.labels.tolist() == records[:, 0].tolist()


def test_both_editions(binary_root: Path, python_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The python edition where there is no other; below the home folder too."""
    batches = [path for path in (python_root / CIFAR10.base_folder).iterdir() if "batch_" in path.name]
    shutil.move(python_root / Cifar10.folder, python_root / "elsewhere")
    assert_is_small_cifar10(python_root)
    for path in batches:
        path.write_bytes(b"garbage")
    assert "is incomplete" in refused_by_both(python_root)
    shutil.move(python_root / "elsewhere", python_root / Cifar10.folder)
    monkeypatch.setenv("HOME", str(binary_root.parent))
    assert_is_small_cifar10(Path("~") / binary_root.name)


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
        ("data_batch_3.bin", records_with(None, 10), "does not hold 10 train images of each class"),
        ("data_batch_3.bin", records_with(3, 4), "does not hold 10 train images of each class"),
        ("test_batch.bin", b"", "{path} holds 0 bytes"),  # before training, too
    ],
    ids=["missing", "too short", "no such label", "too few of a class", "of the test"],
)
def test_a_damaged_file_is_not_replaced_by_the_python_edition(
    binary_root: Path, python_root: Path, name: str, content: bytes | None, words: str
) -> None:
    path = binary_root / Cifar10.folder / name
    path.unlink() if content is None else path.write_bytes(content)
    message = refusal(python_root) if "test" in name else refused_by_both(python_root)
    assert words.format(path=path) in message
    assert "--data.dataset=synthetic" in message


def test_nothing_is_put_in_the_place_of_what_is_there(tmp_path: Path) -> None:
    """An empty folder, a link to a disk that is not mounted, a file."""
    for name, make in {"empty": Path.mkdir, "link": lambda path: path.symlink_to(tmp_path / "not-mounted")}.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / Cifar10.folder)
        assert "data_batch_1.bin cannot be read: No such file" in refused_by_both(tmp_path / name)
    (tmp_path / "file").write_text("not a folder")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"--data.root={root} cannot be written to" in refusal(root)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the web with a small archive, whose hash is taken for the official one."""
    folder = tmp_path / "site"
    folder.mkdir()
    publish(pack(write_binary_edition(tmp_path / "original", records_per_file=PER_FILE), folder / "small.tar.gz"))
    with served(folder) as address:
        monkeypatch.setattr(Cifar10, "url", f"{address}/small.tar.gz")
        yield folder


def publish(archive: Path) -> None:
    """Let the archive be the official one."""
    Cifar10.md5 = hashlib.md5(archive.read_bytes()).hexdigest()


def test_a_download(site: Path, tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    open_dataset("cifar10", root).prepare(download=True)
    assert [path.name for path in root.iterdir()] == [Cifar10.folder]
    assert_is_small_cifar10(root)
    assert socket.getdefaulttimeout() is None


def send_half(handler: http.server.SimpleHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "50000")
    handler.end_headers()
    handler.wfile.write(bytes(500))


@pytest.mark.parametrize("failure", ["hash", "half", "refused", "silent", "no archive", "other folder"])
def test_a_failed_download_is_gone(failure: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, archive = tmp_path / "root", site / "small.tar.gz"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if failure == "hash":
            monkeypatch.setattr(Cifar10, "md5", "0" * 32)  # the archive is whole, but another one
        elif failure == "half":
            monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "do_GET", send_half)
        elif failure == "refused":
            monkeypatch.setattr(Cifar10, "url", NOWHERE)
        elif failure == "silent":
            monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
            monkeypatch.setattr(Cifar10, "url", f"http://127.0.0.1:{listener.getsockname()[1]}/small.tar.gz")
        else:
            archive.write_bytes(b"no archive") if failure == "no archive" else pack(tmp_path / "site", archive)
            publish(archive)
        message = refusal(root)
    for remedy in ("--data.root=", "by hand", "--data.dataset=synthetic"):
        assert remedy in message
    assert "--data.download=true" not in message  # it helps nobody whose download has failed
    assert not root.exists()


@pytest.mark.parametrize("failure", [KeyboardInterrupt("by hand"), OSError(28, "No space left on device")])
def test_broken_unpacking_leaves_nothing(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def extract_one(self: tarfile.TarFile, path: Path, **kwargs: Any) -> None:
        for member in self.getmembers()[:2]:
            self.extract(member, path, **kwargs)
        raise failure

    monkeypatch.setattr(tarfile.TarFile, "extractall", extract_one)
    raised = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else DataError
    with pytest.raises(raised, match=failure.args[-1]):
        open_dataset("cifar10", tmp_path / "root").prepare(download=True)
    assert not [*(tmp_path / "root").glob("*")]


def test_without_permission_to_download_nothing_is_made(tmp_path: Path) -> None:
    message = refusal(tmp_path / "root", may_download=False)
    for remedy in ("--data.root=", "--data.download=true", "--data.dataset=synthetic"):
        assert remedy in message
    assert not (tmp_path / "root").exists()
    with pytest.raises(DataError):
        open_dataset("cifar10", tmp_path / "root").load("test")


def test_of_two_processes_that_finish_the_first_one_stays(tmp_path: Path) -> None:
    with installing(tmp_path / "data", "a set", remedy="") as scratch:
        for folder in (scratch, tmp_path):
            (folder / "data").mkdir()
            (folder / "data" / "file").write_text(folder.name)
    assert (tmp_path / "data" / "file").read_text() == tmp_path.name
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_the_first_images(binary_root: Path) -> None:
    images, whole = (open_dataset("cifar10", binary_root).load("train", num_images=n) for n in (7, None))
    assert torch.equal(images.images, whole.images[:7])
    assert torch.equal(images.labels, whole.labels[:7])
    assert images.images.untyped_storage().nbytes() == 7 * 3072
    for num_images in (0, -1, PER_FILE + 1):
        with pytest.raises(ConfigError, match=f"{num_images} test images asked of CIFAR-10, which has {PER_FILE}"):
            open_dataset("cifar10", binary_root).load("test", num_images=num_images)


@pytest.mark.parametrize(("num_train", "held_out"), [(None, 5000), (50_000, 5000), (600, 60), (9, 0)])
def test_the_default_holds_out_at_most_a_tenth(num_train: int | None, held_out: int) -> None:
    assert CIFAR10DataModule(dataset="synthetic", num_train=num_train).val_size == held_out


@pytest.mark.parametrize("edition", ["binary", "python"])
def test_the_fine_labels_of_cifar100(edition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own number of each class."""
    sizes = {"train": 200, "test": 100}
    monkeypatch.setattr(cifar10, "NUM_IMAGES", sizes)
    pixels = {split: cifar10_records(num, seed=num)[:, 1:] for split, num in sizes.items()}
    labels = {split: np.arange(num) % 100 for split, num in sizes.items()}
    assert (len(set(Cifar100.classes)), list(Cifar100.classes)) == (100, sorted(Cifar100.classes))
    if edition == "binary":
        folder = tmp_path / "cifar-100-binary"
        folder.mkdir()
        for split in sizes:
            coarse = np.full(len(labels[split]), 19)
            np.column_stack([coarse, labels[split], pixels[split]]).astype(np.uint8).tofile(folder / f"{split}.bin")
    else:
        contents = {split: {"data": pixels[split], "fine_labels": labels[split].tolist()} for split in sizes}
        contents["meta"] = {"fine_label_names": list(Cifar100.classes)}
        write_python_edition(tmp_path, CIFAR100, contents, monkeypatch)
    open_dataset("cifar100", tmp_path).prepare(download=False)
    for split in sizes:
        images = open_dataset("cifar100", tmp_path).load(split)
        assert images.labels.tolist() == labels[split].tolist()
        assert images.images.flatten(1).numpy().tolist() == pixels[split].tolist()
        assert images.classes[5] == "bed"


@pytest.mark.parametrize(("name", "data_set"), [("cifar10", Cifar10), ("cifar100", Cifar100)])
def test_the_real_images(name: str, data_set: type[Cifar10], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if not (REAL_ROOT / data_set.folder).is_dir():
        pytest.skip(f"needs {data_set.title}'s binary edition in {REAL_ROOT}; LIT_CIFAR_DATA names another folder")
    open_dataset(name, REAL_ROOT).prepare(download=False)
    train, test = (open_dataset(name, REAL_ROOT).load(split) for split in ("train", "test"))
    num_classes = len(data_set.classes)
    assert torch.bincount(train.labels).tolist() == [50_000 // num_classes] * num_classes
    assert torch.bincount(test.labels).tolist() == [10_000 // num_classes] * num_classes
    info, num_pixels = open_dataset(name, "nowhere"), 50_000 * 32 * 32
    mean = train.images.sum((0, 2, 3)) / (255.0 * num_pixels)
    square = sum(part.float().square().sum((0, 2, 3)).double() for part in train.images.split(2000))
    std = (square / (255.0**2 * num_pixels) - mean.double().square()).sqrt()
    torch.testing.assert_close(mean.double(), torch.tensor(info.mean).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(std, torch.tensor(info.std).double(), atol=1e-5, rtol=0)


def test_a_set_is_a_function_of_seed_and_split_and_begins_as_a_smaller_one() -> None:
    np_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    first, smaller = draw("train", num_images=700, seed=3), draw("train", num_images=BLOCK - 7, seed=3)
    for whole, part in zip(first, smaller, strict=True):
        assert torch.equal(whole[: BLOCK - 7], part)
    for other in (draw("train", num_images=700, seed=4), draw("test", num_images=700, seed=3)):
        assert not torch.equal(first[0], other[0])
        assert not torch.equal(first[1], other[1])
    assert (np.random.get_state()[1] == np_state).all()
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_every_image_is_another_and_classes_are_balanced_in_every_block() -> None:
    (train, labels), (test, _) = draw("train", num_images=4 * BLOCK), draw("test", num_images=1000)
    assert len({image.numpy().tobytes() for image in torch.cat([train, test])}) == 4 * BLOCK + 1000
    counts = torch.stack([torch.bincount(block, minlength=10) for block in labels.split(BLOCK)])
    assert (counts == BLOCK // len(set(CLASSES))).all()


def test_normalisation_statistics_are_those_of_the_images() -> None:
    pixels = draw("train", num_images=10 * BLOCK, seed=5)[0].double() / 255
    for found, said in ((pixels.mean((0, 2, 3)), Synthetic.mean), (pixels.std((0, 2, 3)), Synthetic.std)):
        torch.testing.assert_close(found, torch.tensor(said).double(), atol=4e-3, rtol=0)
