"""Writing of a run's files: whole, so that a reader never sees half of one, and onto the disk when it matters.

A kill loses nothing that has been written; a machine that loses power loses what was not synced.
"""

import csv
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yield a UTF-8 draft, which replaces `path` in the end: that is the old file until the new one is complete.

    Characters that are no text, such as in names of files, are written as their original bytes.
    """
    draft = path.with_name(path.name + ".part")
    with draft.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, as far as they are missing."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # who may not list a folder cannot sync it
        for path in made:
            sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def replace_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a table as a whole: `path` is the old one until the new one is complete, even if the run is killed."""
    with replacing(path) as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def read_csv(path: Path) -> list[list[str]]:
    """The rows of a table; none if it is missing. Bytes that are no text are kept as `replacing` writes them."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return [*csv.reader(file)]


def replace_split(path: Path, header: Sequence[str], split: str, rows: Iterable[Sequence[Any]]) -> None:
    """Replace the rows of `split`, the first column, and keep those of other splits."""
    kept = [row for row in read_csv(path)[1:] if row and row[0] != split]
    replace_csv(path, [header, *kept, *([split, *row] for row in rows)])
