"""Files and folders that are on the disk, and not only in memory, when a checkpoint counts on them.

A kill loses nothing that has been written; a machine that loses power loses what was not synced.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A draft to write to, UTF-8, which replaces `path` in the end: that is the old file until the new one is complete.

    Characters that are no text, as in names of files, are written as their original bytes.
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
