"""A training under a launcher that can be started, observed and ended, and that never outlives its owner."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lit_cifar.launch.forked import ForkedRun
from lit_cifar.tools.chaos.audit import LAUNCH

_STDOUT = 1
_POLL_S = 0.002


@dataclass
class Job:
    """A launcher and its ranks. At the end of a `with` statement all of them are killed.

    `command` gives the arguments of every rank for a number of processes; they write to `folder/run`, by which ranks of
    this machine are found, whoever has started them. Processes that print to `folder/log.txt` are found even if they
    are orphaned. `launcher` are the words before these arguments, by default torchrun's with at most `max_restarts`.
    """

    command: Callable[[int], Sequence[str]]
    folder: Path
    max_restarts: int
    launcher: Sequence[str] = ()
    launches: int = 0
    _launched: ForkedRun | None = None

    @property
    def _log(self) -> Path:
        return self.folder.resolve() / "log.txt"

    def __enter__(self) -> "Job":
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """End every process of the job, stopped and orphaned ones as well."""
        if self._launched is not None:
            self._launched.kill()
        while found := [*self.ranks().values(), *filter(self._is_mine, psutil.process_iter())]:
            for process in found:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, timeout=5)

    def start(self, num_processes: int) -> None:
        """Start the launcher, torchrun with so many ranks, in a user's environment; it must not be running."""
        self.launches += 1
        words = [*self.launcher, *self.command(num_processes)]
        if not self.launcher:
            torchrun = ["--standalone", f"--nproc-per-node={num_processes}", f"--max-restarts={self.max_restarts}"]
            words = [*torchrun, "-m", "lit_cifar", *words]
        own = {"OMP_NUM_THREADS": "1", LAUNCH: str(self.launches)}
        if not self.launcher:
            own["TMPDIR"] = str(self.folder / "tmp")
        self._launched = ForkedRun(
            words,
            environment=os.environ | own,
            stdout=self._log,
            stderr=self._log,
            module=None if self.launcher else "torch.distributed.run",
        )

    @property
    def status(self) -> int | None:
        """Exit status of the launcher; None while it runs, and before it has been started."""
        return None if self._launched is None else self._launched.wait(0.0)

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error, KeyError):  # the process is gone, not ours, or a launcher
                if f"--run_dir={self.folder / 'run'}" in process.cmdline() and is_alive(process):
                    found[process.pid] = _rank_of(process), process
        return {rank: process for rank, process in found.values() if process.ppid() not in found}  # no workers

    def terminate(self, *, limit_s: float) -> bool:
        """Ask the launcher to end, which passes SIGTERM on to every rank. Return whether it has ended in time."""
        assert self._launched is not None
        self._launched.terminate()
        return self._launched.wait(limit_s) is not None

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return any((file.path, file.fd) == (str(self._log), _STDOUT) for file in process.open_files())
        except psutil.Error:  # the process is gone, or not ours
            return False

    @property
    def log_bytes(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def log_since(self, offset: int) -> list[str]:
        """The lines printed beyond `offset`, empty ones left out."""
        text = self._log.read_bytes()[offset:].decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def last_words(self) -> list[str]:
        """The last two lines that name an error, or that were printed."""
        lines = self.log_since(0)
        return ([line for line in lines if "lit_cifar: " in line or "Error: " in line] or lines)[-2:]


def _rank_of(process: psutil.Process) -> int:
    return int(process.environ()["RANK"])


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], *, limit_s: float, poll_s: float = _POLL_S) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True
