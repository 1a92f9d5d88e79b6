"""Runs of the command line, as a user starts them, that leave nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from lit_cifar.errors import ConfigError

TIMEOUT_S = 900.0

REFUSED = 2
"""The exit status with which the command line answers what cannot work."""

_running: set["subprocess.Popen[bytes]"] = set()


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        status: Its exit status; None if it took too long and was stopped.
        stdout: What it printed.
        stderr: What it complained about.
        seconds: How long it took.
    """

    status: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_words(self) -> str:
        """The exit status and the last lines of stderr."""
        reason = "ran into the time limit" if self.status is None else f"exit status {self.status}"
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return "\n".join([f"{reason} after {self.seconds:.0f} s", *(f"  {line[:160]}" for line in lines[-6:])])


def run(subcommand: str, *flags: str, folder: Path, threads: int = 1, timeout_s: float = TIMEOUT_S) -> Outcome:
    """`python -m lit_cifar SUBCOMMAND FLAGS` with its output and temporary files in `folder`.

    Args:
        subcommand: E.g. "fit".
        *flags: What follows it.
        folder: Exists.
        threads: For each process that the command starts.
        timeout_s: After which it is stopped.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, "-m", "lit_cifar", subcommand, *flags]
    start = perf_counter()
    status: int | None = None
    with (
        (folder / "stdout").open("w") as out,
        (folder / "stderr").open("w") as err,
        _session(command, environment, out.fileno(), err.fileno()) as process,
        suppress(subprocess.TimeoutExpired),
    ):
        status = process.wait(timeout_s)
    stdout, stderr = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return Outcome(status, stdout, stderr, perf_counter() - start)


@contextmanager
def _session(
    command: Sequence[str], environment: dict[str, str], stdout: int, stderr: int
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that leads a session of its own; at the end, however it comes, the whole session is killed.

    The processes that the command starts belong to its session. None of them sees a Ctrl-C at this terminal.
    """
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
    _running.add(process)
    try:
        yield process
    finally:
        _kill_session(process)
        process.wait()
        _running.discard(process)


def stop_all() -> None:
    """End every run that other threads of this process wait for."""
    for process in list(_running):
        _kill_session(process)


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def refuse_if_invalid(outcome: Outcome) -> None:
    """Hand on what the command line says about the user's own flags.

    Raises:
        ConfigError: The command ended with an error.
    """
    if outcome.status == 0:
        return
    lines = [line.strip().removeprefix("lit_cifar: error: ") for line in outcome.stderr.splitlines() if line.strip()]
    *problem, remedy = lines[-5:] if len(lines) > 1 else [*lines, "see python -m lit_cifar fit --help"]
    raise ConfigError("\n".join(problem) or "the configuration cannot be read", remedy=remedy)
