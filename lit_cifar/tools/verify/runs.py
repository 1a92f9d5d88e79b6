"""Runs of the command line, started like a user's, that leave nothing behind."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import Any

import yaml  # type: ignore[import-untyped]

from lit_cifar.errors import ConfigError
from lit_cifar.launch.forked import ForkedRun

TIMEOUT_S = 900.0
# Flags of `fit` that `verify` sets itself.
OWNED = {"trainer.strategy", "trainer.devices", "trainer.sync_batchnorm", "trainer.max_steps", "trainer.max_epochs"}
OWNED |= {"run_dir", "ckpt_path", "resume"}

# What the processes of `fit` import, but for the command line, which lies above this room.
TRAINER = ("lightning.pytorch.cli", "lit_cifar.reporting.run_report", "lit_cifar.strategies")
_SHOWN = 3  # lines shown of a run that has failed; a user's mistake takes five, with its remedy
ERROR = "lit_cifar: error: "
_running: set[ForkedRun] = set()
_ended = Event()  # set when no run is wanted, not even one that is being started


@dataclass(frozen=True)
class Outcome:
    status: int | None  # exit status; None if the run took too long and was stopped
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_words(self) -> str:
        reason = "ran into the time limit" if self.status is None else f"exit status {self.status}"
        lines = self._error or [line for line in self.stderr.splitlines() if line.strip()][-_SHOWN:]
        last = (f"  {line[:160]}" for line in lines)
        return "\n".join([f"{reason} after {self.seconds:.0f} s", *last])

    @property
    def _error(self) -> list[str]:
        """The error that the command line, or the first of several ranks, has printed; a launcher prints more."""
        first, *more = self.stderr.partition(ERROR)[2].splitlines() or [""]
        return [first, *(line.strip() for line in takewhile(lambda line: line.startswith("  "), more))] if first else []

    @property
    def refusal(self) -> ConfigError:
        """The error about the user's own flags."""
        lines = self._error or [line.strip() for line in self.stderr.splitlines() if line.strip()][-5:]
        *problem, remedy = lines if len(lines) > 1 else [*lines, "see python -m lit_cifar fit --help"]
        return ConfigError("\n".join(problem) or "the configuration cannot be read", remedy=remedy)


def run(
    subcommand: str,
    *flags: str,
    folder: Path,
    threads: int = 1,
    timeout_s: float = TIMEOUT_S,
    num_ranks: int = 1,
    launcher: Sequence[str] = (),
) -> Outcome:
    """Run `python -m lit_cifar SUBCOMMAND FLAGS` with its output and temporary files in `folder`, which exists.

    Each process that it starts has so many `threads`. After `timeout_s` it is stopped. With `num_ranks` it is started
    in so many processes, as by torchrun. A `launcher` takes the place of `python -m lit_cifar`; it finds its own
    temporary files, by which Ray knows its cluster.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if not launcher:
        environment["TMPDIR"] = str(folder / "tmp")
    out, err = folder / "stdout", folder / "stderr"
    for file in (out, err):
        file.write_text("")
    start = perf_counter()
    forked = ForkedRun(
        [*launcher, subcommand, *flags],
        module=None if launcher else "lit_cifar",
        environment=environment,
        stdout=out,
        stderr=err,
        num_ranks=1 if launcher else num_ranks,
        preload=TRAINER,
    )
    _running.add(forked)
    try:
        if _ended.is_set():
            forked.kill()
        status = forked.wait(timeout_s)
    finally:
        forked.kill()
        _running.discard(forked)
    stdout, stderr = (file.read_text(errors="replace") for file in (out, err))
    return Outcome(status, stdout, stderr, perf_counter() - start)


@contextmanager
def workers(num_at_once: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that wait for runs; after an error inside, all runs are ended at once."""
    pool = ThreadPoolExecutor(max_workers=num_at_once)
    try:
        yield pool
    finally:
        _ended.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for forked in list(_running):
            forked.kill()
        pool.shutdown(wait=True)
        _ended.clear()


def refuse_if_invalid(outcome: Outcome) -> None:
    """Raise the command's own error about the user's flags."""
    if outcome.status != 0:
        raise outcome.refusal


def resolved(flags: Sequence[str], *, folder: Path) -> dict[str, Any]:
    """Every setting of `fit` with its value, after defaults and files."""
    outcome = run("fit", *flags, "--print_config", folder=folder)
    refuse_if_invalid(outcome)
    return dict(yaml.safe_load(outcome.stdout))
