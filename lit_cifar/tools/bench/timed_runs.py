"""Runs of `fit` that are all alive and train in turn, so that they can be compared within seconds of each other.

A run takes longer to start than the steps that are timed. So each is started once, and a callback holds it between two
steps until it is its turn. They talk through a key-value store of torch.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lit_cifar.tools.forked import ForkedRun

_LOOPBACK = "127.0.0.1"
_POLL_S = 0.01
_LONGEST_WAIT = timedelta(days=1)  # for a turn


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """A `fit` to be timed."""

    flags: Sequence[str]
    num_ranks: int = 1  # processes to start, as torchrun does; with 1 the strategy may start others
    threads: int = 1  # of each process


class Interleaved(Callback):
    """Waits before a step until the process that compares the runs allows some; then reports when each step began.

    Args:
        port: Where that process has its store, on this machine.
        name: Of this run.
    """

    def __init__(self, port: int, name: str) -> None:
        self.port = port
        self.name = name
        self._turn = self._left = 0
        self._began: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._store = TCPStore(_LOOPBACK, self.port, timeout=_LONGEST_WAIT)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The batch is there, and everything of the step before is done."""
        self._began.append(monotonic())
        if self._left == 0:
            self._store.set(f"{self.name}/{self._turn}/{trainer.global_rank}", json.dumps(self._began))
            self._turn += 1
            self._left = int(self._store.get(f"{self.name}/{self._turn}"))
            self._began = [monotonic()]
        self._left -= 1


class _Run:
    """A run in processes of its own, of which each has an `Interleaved`."""

    def __init__(self, name: str, run: TimedRun, *, store: TCPStore, folder: Path) -> None:
        self._name = name
        self._num_ranks = run.num_ranks
        self._store = store
        self._turn = 0
        self._errors = folder / "stderr"
        flags = [*run.flags, f"--run_dir={folder / 'run'}", f"--trainer.callbacks+={__name__}.Interleaved"]
        flags += [f"--trainer.callbacks.port={store.port}", f"--trainer.callbacks.name={name}"]
        self.forked = ForkedRun(
            ["fit", *flags],
            environment={**os.environ, "OMP_NUM_THREADS": str(run.threads), "TMPDIR": str(folder)},
            stdout=folder / "stdout",
            stderr=self._errors,
            num_ranks=run.num_ranks,
        )

    def heard(self) -> list[list[float]]:
        """When the steps of this turn began, in each process, once all have said so."""
        keys = [f"{self._name}/{self._turn}/{rank}" for rank in range(self._num_ranks)]
        while not self._store.check(keys):
            if self.forked.wait(_POLL_S) is not None:
                last = self._errors.read_text(errors="replace").splitlines()[-4:]
                raise RuntimeError("\n  ".join([f"fit {self._name} has ended while it was timed", *last]))
        return [json.loads(self._store.get(key)) for key in keys]

    def seconds_per_step(self, *, steps: int, skip: int) -> float:
        """Let it train; the mean of the steps after the first `skip`, of the slowest process."""
        self._turn += 1
        self._store.set(f"{self._name}/{self._turn}", str(skip + steps))
        return max((began[-1] - began[skip]) / steps for began in self.heard())


@contextmanager
def interleaved_runs(timed: Mapping[str, TimedRun], *, folder: Path) -> Iterator[Callable[..., float]]:
    """Start all of `timed` below `folder`, each in so many processes as torchrun would start.

    What it gives takes the name of a fit, `steps` and `skip`: it lets that one alone take `skip + steps` steps and
    returns the mean seconds of the last `steps`. A step includes fetching its batch, but for the first of a turn. All
    are killed at the end, so a fit should ask for more steps than are timed.

    Raises:
        RuntimeError: A fit ended before.
    """
    store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        runs: dict[str, _Run] = {}
        for name, fit in timed.items():
            own = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
            runs[name] = _Run(name, fit, store=store, folder=own)
            stack.callback(runs[name].forked.kill)
        for run in runs.values():
            run.heard()  # when the first batch was there
        yield lambda name, *, steps, skip=1: runs[name].seconds_per_step(steps=steps, skip=skip)
