"""The processes that a training starts: they end with it, those with a session of their own too."""

from contextlib import suppress
from ctypes import CDLL

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def keep_processes() -> None:
    """Let whatever this process starts stay one of its children, also when the one between them ends."""
    CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_processes() -> None:
    """End all that this process has started. Some may wait for a training that was ended."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
