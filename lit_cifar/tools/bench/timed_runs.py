"""Runs of `fit` that are all alive and train in turn, so that they can be compared within seconds of each other.

A run takes longer to start than the steps that are timed. So each is started once, and a callback holds it between two
steps until it is its turn.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.launch.forked import ForkedRun

_LOOPBACK = "127.0.0.1"
_START_S = 180.0  # in which all processes must have begun to train


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """A `fit` to be timed."""

    flags: Sequence[str]
    num_ranks: int = 1  # processes to start, as torchrun does; with 1 the strategy may start others
    threads: int = 1  # of each process


class Interleaved(Callback):
    """Waits before a step until the process that compares the runs allows some; then reports when each step began.

    Args:
        port: Where that process listens, on this machine.
        name: Of this run.
    """

    def __init__(self, port: int, name: str) -> None:
        self.port = port
        self.name = name
        self._left = 0
        self._began: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say who is there."""
        with socket.create_connection((_LOOPBACK, self.port)) as connection:
            self._file = connection.makefile("rw")  # which keeps it open
        self._say({"name": self.name, "rank": trainer.global_rank})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The batch is there, and everything of the step before is done."""
        self._began.append(monotonic())
        if self._left == 0:
            self._say(self._began)
            self._left = int(self._file.readline() or 0)
            self._began = [monotonic()]
        self._left -= 1

    def _say(self, message: object) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()


class _Run:
    """A run and the lines to its processes."""

    def __init__(self, name: str, run: TimedRun, *, port: int, folder: Path) -> None:
        self.name = name
        self.num_ranks = run.num_ranks
        self.lines: list[Any] = []
        self._errors = folder / "stderr"
        flags = [*run.flags, f"--run_dir={folder / 'run'}", f"--trainer.callbacks+={__name__}.Interleaved"]
        flags += [f"--trainer.callbacks.port={port}", f"--trainer.callbacks.name={name}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(run.threads), "TMPDIR": str(folder)}
        self.forked = ForkedRun(
            ["fit", *flags],
            environment=environment,
            stdout=folder / "stdout",
            stderr=self._errors,
            num_ranks=run.num_ranks,
        )

    def check(self) -> None:
        """Raise a `RuntimeError` if it has ended."""
        if self.forked.wait(0) is not None:
            self.fail()

    def fail(self) -> None:
        last = self._errors.read_text(errors="replace").splitlines()[-4:]
        raise RuntimeError("\n  ".join([f"fit {self.name} has ended while it was timed", *last]))

    def end(self) -> None:
        self.forked.kill()
        for line in self.lines:
            with suppress(OSError):
                line.close()

    def seconds_per_step(self, *, steps: int, skip: int) -> float:
        """Let it train; the mean of the steps after the first `skip`, of the slowest process."""
        for line in self.lines:
            line.write(f"{skip + steps}\n")
            line.flush()
        return max((began[-1] - began[skip]) / steps for began in map(self._heard, self.lines))

    def _heard(self, line: Any) -> list[float]:
        said = line.readline()
        if not said:
            self.fail()
        began: list[float] = json.loads(said)
        return began


@contextmanager
def interleaved_runs(timed: Mapping[str, TimedRun], *, folder: Path) -> Iterator[Callable[..., float]]:
    """Start all of `timed` below `folder`, each in so many processes as torchrun would start.

    What it gives takes the name of a fit, `steps` and `skip`: it lets that one alone take `skip + steps` steps and
    returns the mean seconds of the last `steps`. A step includes fetching its batch, but for the first of a turn. All
    are killed at the end, so a fit should ask for more steps than are timed.

    Raises:
        RuntimeError: A fit ended before.
    """
    with socket.create_server((_LOOPBACK, 0)) as server, ExitStack() as stack:
        runs: dict[str, _Run] = {}
        for name, fit in timed.items():
            own = folder / f"{len(list(folder.iterdir()))}-{name}"
            own.mkdir()
            runs[name] = _Run(name, fit, port=server.getsockname()[1], folder=own)
            stack.callback(runs[name].end)
        _meet(server, runs)
        yield lambda name, *, steps, skip=1: runs[name].seconds_per_step(steps=steps, skip=skip)


def _meet(server: socket.socket, runs: Mapping[str, _Run]) -> None:
    """Wait until every process of every run is before its first step."""
    server.settimeout(1.0)
    deadline = monotonic() + _START_S
    while any(len(run.lines) < run.num_ranks for run in runs.values()):
        try:
            connection, _ = server.accept()
        except TimeoutError:
            for run in runs.values():
                run.check()
            if monotonic() > deadline:
                raise RuntimeError(f"no first step within {_START_S:g} s of {', '.join(runs)}") from None
            continue
        with connection:
            connection.settimeout(None)
            line = connection.makefile("rw")
        runs[json.loads(line.readline())["name"]].lines.append(line)
    for run in runs.values():
        for line in run.lines:
            line.readline()  # when the first batch was there
