"""Where the main thread stands, and since when."""

import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary

import lightning
import torch

# A line of Python in one of these is not the user's.
_LIBRARIES = ("<", sysconfig.get_path("stdlib"), *torch.__path__, *lightning.__path__)


class Progress:
    """Observes the main thread, from that of the watchdog.

    Args:
        count: Returns the number of optimizer steps that are done, and others that change when a batch begins or ends.
    """

    def __init__(self, count: Callable[[], tuple[int, ...]]) -> None:
        self._main_thread = threading.main_thread().ident or 0
        self.count = count
        self._counted = count()
        self.place = ""  # line at which the main thread is
        self.idle_s = 0.0  # time in which that thread has begun and ended no batch and was at one place

    def look(self, passed_s: float) -> None:
        """Observe the main thread, `passed_s` after the last time."""
        before = self.place, self._counted
        self.place, self._counted = place_of(_frames_of(self._main_thread)), self.count()
        gets_on = (self.place, self._counted) != before
        self.idle_s = 0.0 if gets_on else self.idle_s + passed_s


def _frames_of(thread_id: int) -> list[FrameSummary]:
    """The frames of a thread of this process, outermost first."""
    frame = sys._current_frames().get(thread_id)
    return list(traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False))[::-1] if frame else []


def place_of(frames: list[FrameSummary]) -> str:
    """The innermost line that is not a library's, and the innermost ones of libraries below it, as one line of text."""
    own = max((i for i, frame in enumerate(frames) if not frame.filename.startswith(_LIBRARIES)), default=-1)
    named = [(frames[own].filename, frames[own])] if own >= 0 else []
    named += [("/".join(Path(frame.filename).parts[-2:]), frame) for frame in frames[own + 1 :][-3:]]
    return " > ".join(f"{name}:{frame.lineno} ({frame.name})" for name, frame in named)
