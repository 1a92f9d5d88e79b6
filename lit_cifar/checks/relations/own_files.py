"""Keeps the user's files as they are while a training runs in its mirror.

In Python, and by torch and safetensors, before a link there is written to, a copy takes its place. A file elsewhere,
which other runs would share, is not written; nor is a link by other code in C, or by a program that the script starts.
"""

import os
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from ctypes import CDLL, byref, c_int, c_size_t, c_uint64
from fcntl import LOCK_EX, LOCK_UN, lockf
from multiprocessing.util import get_temp_dir
from pathlib import Path
from threading import RLock
from typing import Any
from urllib.parse import unquote

import torch

from lit_cifar.checks.relations.mirror import MIRROR
from lit_cifar.checks.relations.patching import before, patched

# Which arguments name what is changed.
_CHANGES: dict[str, tuple[int, ...]] = dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"), (0,))
_CHANGES |= {"os.rename": (0, 1), "os.symlink": (1,), "os.link": (1,)}
# Also to the file that a link names.
_WRITES = {"os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.link", "sqlite3.connect"}
_LARGEST_COPY = 2**30  # bytes
# Of Landlock, a part of Linux.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # numbers of system calls, the same on all processors
_VERSION, _BENEATH, _LEAST = 1, 1, 3  # the last: the version that knows of truncating
_PR_SET_NO_NEW_PRIVS = 38
_RIGHTS = sum(1 << bit for bit in (1, *range(4, 15)))  # to write, remove, make, move and truncate; not to read


class Guard:
    """Watches what this process opens for writing. Other ranks of the run write in the same folder `own`."""

    def __init__(self, own: Path, outside: list[str]) -> None:
        caches = (Path.home() / ".cache", "/dev", "/proc", sys.prefix, tempfile.gettempdir())
        sockets = get_temp_dir()  # that of multiprocessing, where loaders' workers have their sockets
        self._allowed = [Path(place).resolve() for place in (own, sockets, *caches)]
        self._own, self._outside = own, outside
        self._of_ranks, self._of_threads = (own / "lock").open("w"), RLock()

    def start(self) -> None:
        _write_only_below(self._allowed)
        sys.addaudithook(self._audit)
        for name in ("safetensors.torch", "safetensors.numpy"):
            patched(name, "serialize_file", before(self._save))
        patched(torch, "save", before(self._save))
        patched(torch.jit.RecursiveScriptModule, "save", before(self._save))  # type: ignore[attr-defined]

    def _save(self, obj: Any, f: Any, *_: Any, **__: Any) -> None:
        if isinstance(f, str | os.PathLike):  # it is opened by no Python
            self._before_writing(os.fspath(f), begins_empty=True)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | os.PathLike):
            flags = args[2] if isinstance(args[2], int) else 0  # of a `mode` too
            if flags & (os.O_WRONLY | os.O_RDWR):
                self._before_writing(os.fspath(args[0]), begins_empty=bool(flags & os.O_TRUNC))
        elif event in _WRITES and isinstance(args[0], str | bytes | os.PathLike):
            name = os.fsdecode(args[0])
            if not (name.startswith("file:") and "mode=ro" in name):  # a URI of SQLite's
                uri = re.match(r"file:(?://[^/]*)?([^?#]*)", name)
                self._before_writing(unquote(uri[1]) if uri else name)
        for place in _CHANGES.get(event, ()):
            is_named = isinstance(args[place], str | os.PathLike)
            if is_named and not (event == "os.mkdir" and os.path.lexists(args[place])):
                path = Path(args[place]).absolute()
                self._check(path, path.parent.resolve() / path.name)

    def _before_writing(self, name: str, *, begins_empty: bool = False) -> None:
        path = Path(name).absolute()
        if not (path.is_symlink() and path.parent.resolve().is_relative_to(self._own.resolve())):
            self._check(path, path.resolve())
            return
        with self._of_threads:
            lockf(self._of_ranks, LOCK_EX)
            try:
                if path.is_symlink():  # still
                    self._own_copy(path, path.resolve(), begins_empty=begins_empty)
            finally:
                lockf(self._of_ranks, LOCK_UN)

    def _own_copy(self, path: Path, source: Path, *, begins_empty: bool) -> None:
        needs_copy = source.is_file() and not begins_empty
        if source.is_dir() or (needs_copy and source.stat().st_size > _LARGEST_COPY):
            self._check(path, source)
        elif needs_copy:
            copy = self._own / f"copy-{os.getpid()}"
            shutil.copyfile(source, copy)
            copy.replace(path)  # so that no other rank misses it
        else:
            path.unlink()

    def _check(self, path: Path, place: Path) -> None:
        """Refuse a path if the place that it leads to is none of those of this run."""
        if not any(place.is_relative_to(allowed) for allowed in self._allowed):
            self._outside.append(str(path.parent).removeprefix(str(self._own / MIRROR)))
            raise PermissionError(f"{path} is outside of the folder of this run")


def has_landlock() -> bool:
    """Whether Linux guards all files, from 6.2 on: see https://docs.kernel.org/userspace-api/landlock.html."""
    return int(CDLL(None).syscall(_CREATE_RULESET, None, c_size_t(0), _VERSION)) >= _LEAST


def _write_only_below(folders: Iterable[Path]) -> None:
    """Let this thread, and threads and processes that it starts from now on, write nowhere else, in C too."""
    if not has_landlock():
        return
    system = CDLL(None)
    rules = system.syscall(_CREATE_RULESET, byref(c_uint64(_RIGHTS)), c_size_t(8), 0)
    for folder in folders:
        with suppress(OSError):  # it is not there
            place = os.open(folder, os.O_PATH)
            system.syscall(_ADD_RULE, c_int(rules), _BENEATH, struct.pack("=Qi", _RIGHTS, place), 0)
            os.close(place)
    system.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    system.syscall(_RESTRICT_SELF, c_int(rules), 0)
    os.close(rules)
