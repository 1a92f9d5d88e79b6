"""A training under torchrun that can be started, looked at and ended, and that never outlives its owner."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil  # type: ignore[import-untyped]

from lit_cifar.commands.chaos.journal import LAUNCH

_MARK = "LIT_CIFAR_CHAOS_JOB"
POLL_S = 0.002


class Job:
    """torchrun and its ranks. Used in a `with` statement: at its end all of them are killed.

    Every process of the job carries a mark in its environment, by which it is found however it was orphaned.

    Attributes:
        command: What torchrun runs, from the number of processes.
        folder: For what the processes print (`log.txt`) and their temporary files.
        max_restarts: How often torchrun starts the ranks again by itself.
        launches: How often torchrun has been started.
    """

    def __init__(self, command: Callable[[int], Sequence[str]], *, folder: Path, max_restarts: int) -> None:
        self.command = command
        self.folder = folder
        self.max_restarts = max_restarts
        self.launches = 0
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._mark = secrets.token_hex(8)

    def __enter__(self) -> "Job":
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, num_processes: int) -> None:
        """Start torchrun with so many ranks; it must not be running."""
        assert self.status is not None or self._torchrun is None
        self.launches += 1
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_processes}", f"--max-restarts={self.max_restarts}", "-m", "lit_cifar"]
        with (self.folder / "log.txt").open("ab") as log:
            self._torchrun = subprocess.Popen(
                [*command, *self.command(num_processes)],
                env={**os.environ, **self._environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            LAUNCH: str(self.launches),
            _MARK: self._mark,
        }

    @property
    def status(self) -> int | None:
        """Exit status of torchrun; None while it runs, and before it has been started."""
        return None if self._torchrun is None else self._torchrun.poll()

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that are alive, by number."""
        found = {}
        for process in [] if self._torchrun is None else _children(self._torchrun.pid):
            with suppress(psutil.Error, KeyError):
                rank = int(process.environ()["RANK"])
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[rank] = process
        return found

    def terminate(self, *, limit_s: float) -> bool:
        """Ask torchrun to end, which passes SIGTERM on to every rank; whether it has ended within the limit."""
        assert self._torchrun is not None
        self._torchrun.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._torchrun.wait(limit_s)
        return self.status is not None

    def kill(self) -> None:
        """End every process of the job, stopped and orphaned ones as well."""
        while True:
            found = list(self._marked())
            for process in found:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, timeout=5)
            if self._torchrun is not None:
                self._torchrun.wait()
            if not found:
                return

    def _marked(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            mine: bool = process.environ().get(_MARK) == self._mark
            return mine and bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:  # not ours to look at, or gone
            return False

    @property
    def log_bytes(self) -> int:
        """How much the processes have printed so far."""
        path = self.folder / "log.txt"
        return path.stat().st_size if path.exists() else 0

    def log_since(self, offset: int) -> list[str]:
        """The lines printed beyond `offset`, empty ones left out."""
        with (self.folder / "log.txt").open("rb") as file:
            file.seek(offset)
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]


def wait_until(condition: Callable[[], bool], *, limit_s: float, poll_s: float = POLL_S) -> bool:
    """Ask again and again; whether it came true within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children())
    except psutil.Error:
        return []
