"""Runs that are waited for. Each has a folder of its own, and none leaves a process behind."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import perf_counter

from lit_cifar.launch.forked import ForkedRun

_running: set[ForkedRun] = set()
_no_more_runs = Event()  # set while none is wanted, not even one that is being started


@dataclass(frozen=True)
class EndedRun:
    status: int | None  # exit status: of the first rank that failed, or 0; None if the run took too long
    stdout: str
    stderr: str
    seconds: float


def run(
    words: Sequence[str],
    *,
    module: str | None,
    folder: Path,
    limit_s: float,
    num_ranks: int = 1,
    threads: int = 1,
    variables: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> EndedRun:
    """Run `python -m MODULE WORDS` (see `ForkedRun`) to its end, or for `limit_s` seconds. Nothing of it stays running.

    Its output and temporary files are in `folder`, which exists. Each of its processes has so many `threads`, and this
    process's environment with further `variables`. Without a module, WORDS are a command of any program, which finds
    temporary files by itself: Ray knows its cluster by them.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(variables or {})}
    if module is not None:
        environment["TMPDIR"] = str(folder / "tmp")
    out, err = folder / "stdout", folder / "stderr"
    for file in (out, err):
        file.write_text("")
    start = perf_counter()
    streams = {"stdout": out, "stderr": err}
    forked = ForkedRun(words, module=module, environment=environment, num_ranks=num_ranks, preload=preload, **streams)
    _running.add(forked)
    try:
        if _no_more_runs.is_set():
            forked.kill()
        status = forked.wait(limit_s)
    finally:
        forked.kill()
        _running.discard(forked)
    stdout, stderr = (file.read_text(errors="replace") for file in (out, err))
    return EndedRun(status, stdout, stderr, perf_counter() - start)


@contextmanager
def workers(num_at_once: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that wait for runs; after an error inside, all runs are ended at once."""
    pool = ThreadPoolExecutor(max_workers=num_at_once)
    try:
        yield pool
    finally:
        _no_more_runs.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for forked in list(_running):
            forked.kill()
        pool.shutdown(wait=True)
        _no_more_runs.clear()
