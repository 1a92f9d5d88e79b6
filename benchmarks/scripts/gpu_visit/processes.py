"""Processes with a time limit, of which nothing stays behind."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lit_cifar.launch.forked import ForkedRun

MARK = "LIT_CIFAR_GPU_VISIT"
"""Environment variable by which every process that a run has started is found, whatever session it is in."""

_LAST_LINES = 8
_TRACEBACK_S = 2.0  # in which a process that is out of time writes down where it stands
_running: set[ForkedRun] = set()
_over = threading.Event()


class OutOfTimeError(Exception):
    """No process may be started any more."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int | None  # None if it took too long and was stopped
    output: str  # errors included
    seconds: float

    @property
    def last_words(self) -> str:
        """How it ended, and the last of what it printed, in one line."""
        reason = "time limit" if self.status is None else f"exit status {self.status}"
        lines = [line.strip()[:200] for line in self.output.splitlines() if line.strip()]
        return f"{reason} after {self.seconds:.0f} s: " + " / ".join(lines[-_LAST_LINES:])


def run(words: Sequence[str], *, environment: Mapping[str, str], log: Path, timeout_s: float) -> Ended:
    """`python -m WORDS` until it ends or `timeout_s` have passed; then it and all that it has started are gone.

    What it prints goes to the file `log`. When its time is over it is asked where it stands, and killed.

    Raises:
        OutOfTimeError: After `end_all`.
    """
    if _over.is_set():
        raise OutOfTimeError
    mark = uuid.uuid4().hex
    module, *rest = words
    start = time.monotonic()
    child = ForkedRun(rest, environment={**environment, MARK: mark}, stdout=log, stderr=log, module=module)
    _running.add(child)
    try:
        status = child.wait(timeout_s)
        if status is None:
            for pid in child.pids:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGABRT)  # Python's fault handler writes the stack of every thread
            child.wait(_TRACEBACK_S)
    finally:
        _running.discard(child)
        child.kill()
        _end_marked(mark)
    if _over.is_set():
        raise OutOfTimeError
    return Ended(status, log.read_text(errors="replace") if log.exists() else "", time.monotonic() - start)


def end_all() -> None:
    """Kill every process that runs, and let no other one start: for who leads the visit and is told to stop."""
    _over.set()
    for child in list(_running):
        child.kill()


def _end_marked(mark: str) -> None:
    """Kill what a run has started in sessions of their own; on Linux alone, elsewhere nothing is found."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
