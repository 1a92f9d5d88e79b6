"""A training under torchrun that can be started, observed and ended, and that never outlives its owner."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from lit_cifar.tools.chaos.sample_log import LAUNCH
from lit_cifar.tools.forked import ForkedRun

_STDOUT = 1
_POLL_S = 0.002


class TorchrunJob:
    """torchrun and its ranks. Used in a `with` statement: at its end all of them are killed.

    Every process of the job prints to `folder/log.txt`, by which it is found however it was orphaned. `command` gives
    the arguments of every rank for a number of processes.
    """

    def __init__(self, command: Callable[[int], Sequence[str]], *, folder: Path, max_restarts: int) -> None:
        self.command = command
        self.folder = folder
        self.max_restarts = max_restarts
        self.launches = 0
        self._log = folder.resolve() / "log.txt"
        self._torchrun: ForkedRun | None = None

    def __enter__(self) -> "TorchrunJob":
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """End every process of the job, stopped and orphaned ones as well."""
        if self._torchrun is not None:
            self._torchrun.kill()
        while found := [process for process in psutil.process_iter() if self._is_mine(process)]:
            for process in found:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, timeout=5)

    def start(self, num_processes: int) -> None:
        """Start torchrun with so many ranks; it must not be running. It finds what one finds that a user starts."""
        self.launches += 1
        flags = ["--standalone", f"--nproc-per-node={num_processes}", f"--max-restarts={self.max_restarts}"]
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp"), LAUNCH: str(self.launches)}
        self._torchrun = ForkedRun(
            [*flags, "-m", "lit_cifar", *self.command(num_processes)],
            environment=os.environ | own,
            stdout=self._log,
            stderr=self._log,
            module="torch.distributed.run",
        )

    @property
    def status(self) -> int | None:
        """Exit status of torchrun; None while it runs, and before it has been started."""
        return None if self._torchrun is None else self._torchrun.wait(0.0)

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks that are alive, by rank."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._torchrun.pids[0]).children() if self._torchrun else ():
                with suppress(psutil.Error, KeyError):  # gone, or not yet the rank that it becomes
                    rank = int(process.environ()["RANK"])
                    if is_alive(process):
                        found[rank] = process
        return found

    def terminate(self, *, limit_s: float) -> bool:
        """Ask torchrun to end, which passes SIGTERM on to every rank; whether it has ended within the limit."""
        assert self._torchrun is not None
        self._torchrun.terminate()
        return self._torchrun.wait(limit_s) is not None

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return any((file.path, file.fd) == (str(self._log), _STDOUT) for file in process.open_files())
        except psutil.Error:  # not ours to look at, or gone
            return False

    @property
    def log_bytes(self) -> int:
        """How much the processes have printed so far."""
        return self._log.stat().st_size if self._log.exists() else 0

    def log_since(self, offset: int) -> list[str]:
        """The lines printed beyond `offset`, empty ones left out."""
        text = self._log.read_bytes()[offset:].decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def last_words(self) -> list[str]:
        """The last two lines that name an error, or that were printed."""
        lines = self.log_since(0)
        return ([line for line in lines if "lit_cifar: " in line or "Error: " in line] or lines)[-2:]


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], *, limit_s: float, poll_s: float = _POLL_S) -> bool:
    """Poll the condition; whether it became true within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True
