"""A folder for each process of a run that looks like the user's own and changes nothing in it.

Folders are made anew and files are links; before a link is written to, a copy takes its place. A file elsewhere, which
other runs would share, is not written.
"""

import os
import re
import shutil
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

from lit_cifar.checks.relations.patching import patched

_MOST = 5000  # files and folders; a folder with more is a link, and what is in it cannot be written
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}
_WRITES = {"os.truncate", "sqlite3.connect"}  # also to the file that a link names
_SKIPPED = {".git", "__pycache__", ".venv", "venv", "node_modules"}


def mirror(folder: Path, place: Path) -> Path:
    """Make `place` with links to the neighbours of `folder`, and return a folder in it with links to its files."""
    target = place / (folder.name or "root")
    target.mkdir(parents=True)
    for neighbour in [*islice(folder.parent.iterdir(), _MOST)]:
        if neighbour.name != folder.name:
            (place / neighbour.name).symlink_to(neighbour)
    left = _MOST
    for origin, folders, files in os.walk(folder):
        here = target / Path(origin).relative_to(folder)
        folders[:] = sorted(set(folders) - _SKIPPED)
        left -= len(folders) + len(files)
        if left < 0:
            for name in (*folders, *files):
                (here / name).symlink_to(Path(origin, name))
            folders[:] = []
            continue
        for name in (*folders, *files):
            path = Path(origin, name).absolute()
            if path.is_dir() and not path.is_symlink():
                (here / name).mkdir()
            elif path.suffix == ".py" and path.is_file():  # it may ask where it is, behind links too
                shutil.copyfile(path, here / name)
            else:  # a file, or such as a link to data on another disk
                (here / name).symlink_to(path)
    return target


class Guard:
    """Watches what this process opens for writing."""

    def __init__(self, own: Path, outside: list[str]) -> None:
        caches = (Path.home() / ".cache", "/dev", "/proc", sys.prefix, tempfile.gettempdir())
        self._allowed = [Path(place).resolve() for place in (own, *caches)]
        self._own, self._outside = own, outside

    def start(self) -> None:
        sys.addaudithook(self._audit)
        patched(torch, "save", self._save)
        patched(torch.jit.RecursiveScriptModule, "save", self._save)  # type: ignore[attr-defined]

    def _save(self, save: Any, obj: Any, f: Any, *args: Any, **settings: Any) -> None:
        if isinstance(f, str | os.PathLike):  # torch opens it by itself
            self._before_writing(os.fspath(f))
        save(obj, f, *args, **settings)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | os.PathLike):
            mode, flags = args[1], args[2] if isinstance(args[2], int) else 0
            writes = (
                any(char in mode for char in "wax+") if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR)
            )
            if writes:
                self._before_writing(os.fspath(args[0]))
        elif event == "os.mkdir" and isinstance(args[0], str) and not os.path.lexists(args[0]):
            self._check(args[0], Path(args[0]).absolute().resolve())
        elif event in _WRITES and isinstance(args[0], str | bytes | os.PathLike):
            name = os.fsdecode(args[0])
            if not (name.startswith("file:") and "mode=ro" in name):  # a URI of SQLite's
                uri = re.match(r"file:(?://[^/]*)?([^?#]*)", name)
                self._before_writing(unquote(uri[1]) if uri else name)
        elif event in _CHANGES:
            for name in args[: 2 if event == "os.rename" else 1]:
                if isinstance(name, str | os.PathLike):
                    path = Path(name).absolute()
                    self._check(str(name), path.parent.resolve() / path.name)

    def _before_writing(self, name: str) -> None:
        path = Path(name).absolute()
        if path.is_symlink() and path.parent.resolve().is_relative_to(self._own.resolve()):
            source = path.resolve()
            path.unlink()
            if source.is_file():
                shutil.copyfile(source, path)
            return
        self._check(str(path), path.resolve())

    def _check(self, name: str, path: Path) -> None:
        if not any(path.is_relative_to(place) for place in self._allowed):
            self._outside.append(name)
            raise PermissionError(f"{name} is outside of the folder of this run, so that runs would share it")
