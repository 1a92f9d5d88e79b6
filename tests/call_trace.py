"""Which functions of the package are called, in the order of their first calls."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L

import lit_cifar

PACKAGE = str(Path(lit_cifar.__file__).parent) + os.sep


class CallTrace(L.Callback):
    """Traces the process of a run from its start on; processes that a trainer launches are traced as well.

    Args:
        file: Gets a line "module.py function" for each function that is called for the first time.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        install(Path(file))


def install(file: Path) -> None:
    """Trace this thread and those that it starts from now on."""
    seen: set[Any] = set()
    # Each line is appended at once: a process may end at any moment, and several write.
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            if code.co_filename.startswith(PACKAGE):
                os.write(descriptor, f"{code.co_filename.removeprefix(PACKAGE)} {code.co_name}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


@contextmanager
def traced(file: Path) -> Iterator[None]:
    """Trace what runs inside."""
    install(file)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
