"""A folder of exported files: made whole or not at all, with what each file was compared with and its hash."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_cifar.errors import ConfigError, DataError
from lit_cifar.reporting.environment import versions
from lit_cifar.tools.export.classifier import Trained
from lit_cifar.tools.export.formats import Format, trace

RECORD = "export.json"
BOUND = 1e-4
"""How far a logit may differ, in units of the largest logit. Other kernels round otherwise, by about 1e-6."""

_AGAIN = "export the checkpoint again, to another --output"


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A file's logits beside the checkpoint's.

    Attributes:
        file: Its name.
        difference: The largest, in units of the largest logit; nan if there are logits that are not finite.
        num_same: Images for which both find the same class.
        num_images: Images in all.
    """

    file: str
    difference: float
    num_same: int
    num_images: int

    @classmethod
    def of(cls, file: str, found: Tensor, expected: Tensor) -> "Agreement":
        """Of logits, (n, num_classes)."""
        largest = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
        same = found.argmax(dim=1) == expected.argmax(dim=1)
        difference = float((found - expected).abs().max() / largest)
        return cls(file=file, difference=difference, num_same=int(same.sum()), num_images=len(expected))

    @property
    def passed(self) -> bool:
        """Whether the file computes what the checkpoint does; of two classes as likely, rounding may choose either."""
        return self.difference <= BOUND

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.num_same} of {self.num_images} images in the same class, largest difference "
            f"{self.difference:.0e} of the largest logit"
        )


def export(
    trained: Trained, formats: Sequence[type[Format]], *, folder: Path, record: dict[str, Any]
) -> list[Agreement]:
    """Write the files, run each again, and compare it with the checkpoint; `folder` is made only if all agree.

    Args:
        trained: The checkpoint.
        formats: What to write.
        folder: Must not exist, or be empty.
        record: What `export.json` says of the checkpoint.

    Raises:
        ConfigError: The network cannot be traced, or `folder` cannot be written.
        DataError: There are no images to compare on.
    """
    images = trained.images()
    expected = trained.logits(images)
    program = trace(trained.classifier(), trained.module.image_shape)
    batches = [images.images[:1], images.images[1:]]  # of any size
    with _draft(folder) as draft:
        comparisons = []
        for form in formats:
            (draft / form.file).write_bytes(form.content(program))
            comparisons.append(Agreement.of(form.file, form.run(draft / form.file, batches), expected))
        if all(comparison.passed for comparison in comparisons):
            _write_record(draft, trained, comparisons, record)
            draft.replace(folder)
    return comparisons


def check(folder: Path) -> list[str]:
    """The files of a folder, if they are those that were compared with the checkpoint.

    Nothing of them is loaded.

    Raises:
        DataError: A file is missing or has changed, or the folder holds no export.
    """
    try:
        files: dict[str, Any] = json.loads((folder / RECORD).read_text())["files"]
        expected = {str(name): str(entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder / RECORD} cannot be read: {type(error).__name__}: {error}",
            remedy="name a folder that `python -m lit_cifar export` wrote",
        ) from error
    for name, sha256 in expected.items():
        try:
            found = digest(folder / name)
        except OSError as error:
            raise DataError(f"{folder / name} cannot be read: {error.strerror}", remedy=_AGAIN) from error
        if found != sha256:
            raise DataError(f"{folder / name} has changed since it was compared with its checkpoint", remedy=_AGAIN)
    return [*expected]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def check_free(folder: Path) -> None:
    """Raise a `ConfigError` if `folder` holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder", remedy="choose another: --output FOLDER")


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, which is gone afterwards, renamed or removed."""
    draft = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
        draft.mkdir(parents=True)
        yield draft
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror or error}", remedy="choose another: --output FOLDER"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_record(draft: Path, trained: Trained, comparisons: Sequence[Agreement], record: dict[str, Any]) -> None:
    height = trained.module.header.image_size
    content = record | {
        "network": str(trained.module.header),
        "classes": trained.data.classes,
        "images": f"uint8 (n, 3, {height}, {height}), RGB from 0 to 255; the network normalises them itself",
        "logits": f"float32 (n, {len(trained.data.classes)}); their softmax are probabilities",
        "files": {
            c.file: {
                "sha256": digest(draft / c.file),
                "images_compared": c.num_images,
                "images_in_the_same_class": c.num_same,
                "largest_difference": c.difference,
            }
            for c in comparisons
        },
        "versions": versions(),
    }
    (draft / RECORD).write_text(json.dumps(content, indent=2) + "\n")
