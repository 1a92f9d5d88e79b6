"""Processes with a time limit, of which nothing stays behind; standard library only."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

MARK = "LIT_CIFAR_GPU_VISIT"
"""Environment variable by which every process that a run has started is found, whatever session it is in."""

_LAST_LINES = 8
_TRACEBACK_S = 2.0  # in which a process that is out of time writes down where it stands
_starting = threading.Lock()
_running: "set[_Started | _Forked]" = set()
_over = threading.Event()


class OutOfTimeError(Exception):
    """No process may be started any more."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        status: Its exit status; None if it took too long and was stopped.
        output: What it printed, errors included.
        seconds: How long it took.
    """

    status: int | None
    output: str
    seconds: float

    @property
    def last_words(self) -> str:
        """How it ended, and the last of what it printed, in one line."""
        reason = "time limit" if self.status is None else f"exit status {self.status}"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return f"{reason} after {self.seconds:.0f} s: " + " / ".join(line[:200] for line in lines[-_LAST_LINES:])


def run(words: Sequence[str], *, environment: Mapping[str, str], log: Path, timeout_s: float, forked: bool) -> Ended:
    """`python -m WORDS` until it ends or `timeout_s` have passed; then it and all that it has started are gone.

    Args:
        words: Module and arguments.
        environment: The whole environment.
        log: File for what it prints.
        timeout_s: After which it is asked where it stands, and killed.
        forked: From a process that has imported the package; for the module `lit_cifar` only.

    Raises:
        OutOfTimeError: After `end_all`.
    """
    mark = uuid.uuid4().hex
    environment = {**environment, MARK: mark}
    start = time.monotonic()
    log.write_text("")
    if _over.is_set():
        raise OutOfTimeError
    child = _Forked(words, environment, log) if forked else _Started(words, environment, log)
    _running.add(child)
    try:
        status = child.wait(timeout_s)
        if status is None:
            child.signal(signal.SIGABRT)  # Python's fault handler writes the stack of every thread
            child.wait(_TRACEBACK_S)
    finally:
        _running.discard(child)
        child.signal(signal.SIGKILL)
        child.wait(_TRACEBACK_S)
        _end_marked(mark)
    if _over.is_set():
        raise OutOfTimeError
    return Ended(status, log.read_text(errors="replace"), time.monotonic() - start)


def end_all() -> None:
    """Kill every process that runs, and let no other one start: for who leads the visit and is told to stop."""
    _over.set()
    for child in list(_running):
        child.signal(signal.SIGKILL)


class _Started:
    """A new interpreter, in a session of its own."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *words],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class _Forked:
    """A process forked from one that has imported the package; see `lit_cifar.launch.forked`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        module, *rest = words
        assert module == "lit_cifar"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lit_cifar.cli.main"])
        self._process: ForkServerProcess = context.Process(target=_become, args=(rest, dict(environment), str(log)))
        with _starting:
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:  # else the new process would import this one's program
                self._process.start()
            finally:
                sys.modules["__main__"] = main

    def wait(self, timeout_s: float) -> int | None:
        wait([self._process.sentinel], timeout=max(0.0, timeout_s))
        return self._exit_code

    @property
    def _exit_code(self) -> int | None:
        with _starting:  # as in `lit_cifar.launch.forked`: to start a process asks for all exit codes too
            return self._process.exitcode

    def signal(self, number: int) -> None:
        assert self._process.pid
        if self._exit_code is None:
            os.kill(self._process.pid, number)  # which may not lead its session yet
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _become(words: list[str], environment: dict[str, str], log: str) -> None:
    from lit_cifar.launch import forked

    forked._run("lit_cifar", words, environment, stdout=log, stderr=log, folder=str(Path.cwd()))


def _end_marked(mark: str) -> None:
    """Kill what a run has started in sessions of their own; on Linux alone, elsewhere nothing is found."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
