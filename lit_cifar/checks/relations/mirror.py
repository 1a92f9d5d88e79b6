"""The user's files as a run sees them: where it may write, files are links and folders are made anew.

A path has the same place in the mirror as on the disk, so that whatever is found from a script's own path, or its
working folder, is found there too. What may be written begins at the root of the git tree or package; others are links.
"""

import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from lit_cifar.checks.relations.plan import Target

MIRROR = "mirror"  # in the folder of a run
_MOST = 5000  # files and folders; a folder for which no place is left is a link, and what is in it cannot be written
_LEFT_OUT = {"__pycache__"}
_LINKED = {".git", "node_modules", "site-packages"}


def mirror(place: Path, folders: Sequence[Path]) -> None:
    """Make `place`, a mirror in which these folders and what is in their roots can be written, as far as there is room.

    It is made once, before the processes of the run that share it.
    """
    roots = [root_of(folder) for folder in folders]
    spine = {part for folder in folders for part in (folder, *folder.parents)}  # which are made whatever their size
    for folder in folders:
        _at(place, folder).mkdir(parents=True, exist_ok=True)
    left = _MOST
    waiting = deque(dict.fromkeys([*folders, *roots, *sorted(spine)]))  # what is nearest first
    while waiting:
        folder = waiting.popleft()
        is_own = any(folder.is_relative_to(root) for root in roots) and not _is_shared(folder)
        entries = _entries(folder, None if folder in folders else _MOST + 1)
        has_room = is_own and len(entries) <= left
        if not has_room and folder not in spine:
            _at(place, folder).symlink_to(folder)
            continue
        _at(place, folder).mkdir(exist_ok=True)
        left -= len(entries) if has_room else 0
        for entry in entries:
            if entry in spine:
                continue
            if has_room and entry.is_dir() and not entry.is_symlink() and entry.name not in _LINKED:
                waiting.append(entry)
            elif (has_room or folder in folders) and entry.suffix == ".py" and entry.is_file():
                shutil.copyfile(entry, _at(place, entry))  # it may ask where it is, behind links too
            else:  # a file, or such as a link to data on another disk
                _at(place, entry).symlink_to(entry)


def mirrored(place: Path, path: Path) -> Path:
    """Where a path is in the mirror; the path itself, if it can only be read there."""
    there = _at(place, path)
    folder = there if there.is_dir() else there.parent
    return there if there.exists() and folder.resolve().is_relative_to(place.resolve()) else path


def root_of(folder: Path) -> Path:
    """The root of the git tree or package that a folder is in. It is no home, nor a folder that all programs share."""
    tree = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
    package = folder
    while (package / "__init__.py").is_file():
        package = package.parent
    return next((root for root in (tree, package) if root is not None and not _is_shared(root)), folder)


def folders_of(target: Target) -> list[Path]:
    """The user's folder, and that of the script, unless it belongs to Python or to a package that is installed."""
    own = Path(target.folder)
    script = (own / target.program).parent
    is_installed = script.is_relative_to(sys.prefix) or "site-packages" in script.parts
    return [own] if target.is_module or is_installed else [own, script]


def _at(place: Path, path: Path) -> Path:
    return place / path.relative_to(path.anchor)


def _is_shared(folder: Path) -> bool:
    return any(Path(place).is_relative_to(folder) for place in (Path.home(), tempfile.gettempdir()))


def _entries(folder: Path, most: int | None) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            names = [entry.name for entry in islice(found, most)]
    except OSError:  # another user's
        return []
    return [folder / name for name in sorted(names) if name not in _LEFT_OUT]
