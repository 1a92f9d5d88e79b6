"""A training under torchrun that can be started, observed and ended, and that never outlives its owner."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lit_cifar.chaos.workers import ANEW, LAUNCH, WORKERS, Worker, read_workers
from lit_cifar.launch.forked import ForkedRun

_AGENT = "lit_cifar.chaos.agent"
_STDOUT = 1
POLL_S = 0.002


class TorchrunJob:
    """torchrun and its ranks. Used in a `with` statement: at its end all of them are killed.

    Every process of the job prints to `folder/log.txt`, by which it is found however it was orphaned. `command` gives
    the arguments of every rank for a number of processes. Of the starts of the ranks the first and every n-th after it,
    with n `anew_every`, are new Pythons, as under torchrun itself. In the others they are forked from a process that
    has imported the package.
    """

    def __init__(
        self, command: Callable[[int], Sequence[str]], *, folder: Path, max_restarts: int, anew_every: int
    ) -> None:
        self.command = command
        self.folder = folder
        self.max_restarts = max_restarts
        self.anew_every = anew_every
        self.launches = 0
        self._torchrun: ForkedRun | None = None

    def __enter__(self) -> "TorchrunJob":
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, num_processes: int) -> None:
        """Start torchrun with so many ranks; it must not be running."""
        assert self.status is not None or self._torchrun is None
        self.launches += 1
        flags = ["--standalone", f"--nproc-per-node={num_processes}", f"--max-restarts={self.max_restarts}"]
        self._torchrun = ForkedRun(
            [*flags, "-m", "lit_cifar", *self.command(num_processes)],
            environment={**os.environ, **self._environment()},
            stdout=self._log,
            stderr=self._log,
            module=_AGENT,
        )

    def _environment(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            LAUNCH: str(self.launches),
            WORKERS: str(self.folder / "workers.jsonl"),
            ANEW: str(self.anew_every),
        }

    @property
    def status(self) -> int | None:
        """Exit status of torchrun; None while it runs, and before it has been started."""
        return None if self._torchrun is None else self._torchrun.wait(0.0)

    def ranks(self) -> dict[int, psutil.Process]:
        found, torchrun = {}, None if self._torchrun is None else self._torchrun.pids[0]
        for worker in self.newest:
            with suppress(psutil.Error):
                process = psutil.Process(worker.pid)
                if process.ppid() == torchrun and process.status() != psutil.STATUS_ZOMBIE:
                    found[worker.rank] = process
        return found

    @property
    def workers(self) -> list[Worker]:
        """All ranks of all starts so far, the newest last."""
        return read_workers(self.folder / "workers.jsonl")

    @property
    def newest(self) -> list[Worker]:
        workers = self.workers
        return [worker for worker in workers if worker.start == workers[-1].start]

    def terminate(self, *, limit_s: float) -> bool:
        """Ask torchrun to end, which passes SIGTERM on to every rank; whether it has ended within the limit."""
        assert self._torchrun is not None
        self._torchrun.terminate()
        return self._torchrun.wait(limit_s) is not None

    def kill(self) -> None:
        """End every process of the job, stopped and orphaned ones as well."""
        if self._torchrun is not None:
            self._torchrun.kill()
        while found := [process for process in psutil.process_iter() if self._is_mine(process)]:
            for process in found:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, timeout=5)

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return any((file.path, file.fd) == (str(self._log), _STDOUT) for file in process.open_files())
        except psutil.Error:  # not ours to look at, or gone
            return False

    @property
    def _log(self) -> Path:
        return self.folder.resolve() / "log.txt"

    @property
    def log_bytes(self) -> int:
        """How much the processes have printed so far."""
        return self._log.stat().st_size if self._log.exists() else 0

    def log_since(self, offset: int) -> list[str]:
        """The lines printed beyond `offset`, empty ones left out."""
        with self._log.open("rb") as file:
            file.seek(offset)
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def last_words(self) -> list[str]:
        return [line for line in self.log_since(0) if "lit_cifar: " in line or "Error: " in line][-2:]


def wait_until(condition: Callable[[], bool], *, limit_s: float, poll_s: float = POLL_S) -> bool:
    """Poll the condition; whether it became true within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True
