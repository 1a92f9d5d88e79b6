"""A training under torchrun that can be started, observed and ended, and that never outlives its owner."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lit_cifar.launch.forked import ForkedRun
from lit_cifar.tools.chaos.sample_log import LAUNCH, Start

# Environment variable: the file to which a line is appended for every worker that is started.
WORKERS = "LIT_CIFAR_CHAOS_WORKERS"
# Environment variable: the first start and every n-th one after it use a new Python; with 0 none does.
ANEW = "LIT_CIFAR_CHAOS_ANEW"
_STDOUT = 1
_POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A process that torchrun has started."""

    start: Start  # which start of the processes it belongs to
    rank: int
    pid: int
    anew: bool  # whether Python was started for it, as torchrun does; else it was forked
    at_s: float  # when, on the machine's monotonic clock

    def write(self, path: Path) -> None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def is_anew(start: Start, every: int) -> bool:
    """Whether the workers of `start` are new Pythons: those of the first start and of every n-th one after it are."""
    return every > 0 and sum(start) % every == 1 % every


def read_workers(path: Path) -> list[Worker]:
    """All that were started so far, the first one first; a line that is being written is left out."""
    if not path.exists():
        return []
    lines, _, _ = path.read_text().rpartition("\n")
    return [Worker(**{**content, "start": tuple(content["start"])}) for content in map(json.loads, lines.splitlines())]


class TorchrunJob:
    """torchrun and its ranks. Used in a `with` statement: at its end all of them are killed.

    Every process of the job prints to `folder/log.txt`, by which it is found however it was orphaned. `command` gives
    the arguments of every rank for a number of processes. Of the starts of the ranks the first and every n-th after it,
    with n `anew_every`, are new Pythons, as under torchrun itself. In the others they are forked from a process that
    has imported the package.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        folder: Path,
        max_restarts: int,
        anew_every: int,
        program: Sequence[str] = ("-m", "lit_cifar"),
    ) -> None:
        self.command = command
        self.program = program
        self.folder = folder
        self.max_restarts = max_restarts
        self.anew_every = anew_every
        self.launches = 0
        self._log = folder.resolve() / "log.txt"
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
            [*flags, *self.program, *self.command(num_processes)],
            environment={**os.environ, **self._environment()},
            stdout=self._log,
            stderr=self._log,
            module="lit_cifar.tools.chaos.agent",
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
        """The processes of the newest start that are alive, by rank."""
        found, torchrun = {}, None if self._torchrun is None else self._torchrun.pids[0]
        for worker in self.newest:
            with suppress(psutil.Error):
                process = psutil.Process(worker.pid)
                if process.ppid() == torchrun and is_alive(process):
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
    def log_bytes(self) -> int:
        """How much the processes have printed so far."""
        return self._log.stat().st_size if self._log.exists() else 0

    def log_since(self, offset: int) -> list[str]:
        """The lines printed beyond `offset`, empty ones left out."""
        text = self._log.read_bytes()[offset:].decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def last_words(self) -> list[str]:
        return [line for line in self.log_since(0) if "lit_cifar: " in line or "Error: " in line][-2:]


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
