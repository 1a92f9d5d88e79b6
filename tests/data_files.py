"""Small data files in the official formats, and a web server on this machine to fetch them from."""

import hashlib
import http.server
import pickle
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lit_cifar.data.cifar10 import Cifar10

NUM_CLASSES = 10


def cifar10_records(num_records: int, *, seed: int = 0) -> np.ndarray:
    """Random CIFAR-10 records, uint8, (num_records, 3073), as many of each class."""
    records = np.random.default_rng(seed).integers(0, 256, (num_records, 3073), np.uint8)
    records[:, 0] = np.arange(num_records) % NUM_CLASSES
    return records


def write_binary_edition(root: Path, *, records_per_file: int) -> Path:
    """Make `root/cifar-10-batches-bin`; file i holds `cifar10_records(records_per_file, seed=i)`."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for i, name in enumerate([*Cifar10.files["train"], *Cifar10.files["test"]]):
        cifar10_records(records_per_file, seed=i).tofile(folder / name)
    return folder


def write_python_edition(root: Path, kind: Any, contents: dict[str, object], patch: pytest.MonkeyPatch) -> Path:
    """Make the folder of `kind`, a class of torchvision, which then takes these pickles for the official files."""
    folder = root / kind.base_folder
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    hashes = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    for split in ("train_list", "test_list"):
        patch.setattr(kind, split, [[name, hashes[name]] for name, _ in getattr(kind, split)])
    patch.setattr(kind, "meta", {**kind.meta, "md5": hashes[kind.meta["filename"]]})
    return folder


def pack(folder: Path, archive: Path) -> Path:
    """Make `archive`, a tar.gz of `folder` under its own name."""
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    return archive


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a web server on this machine that serves `folder`."""
    handler = partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def draw_pictures(folder: Path, num: int, *, seed: int = 0, kind: str = "png") -> None:
    """`num` pictures of noise, of different sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for index in range(num):
        pixels = generator.integers(0, 256, (30 + index, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.{kind}")
