"""Runs of a program in processes forked from one that has imported torch and Lightning, and what the caller names.

Importing them takes longer than the short trainings that are compared here, and each of their processes would do it
again. A fork server (see `multiprocessing`) does it once. Its processes have the environment, the files and the session
of a process that a user starts, and share two things: the seed of Python's string hashes, and the imports.

A run that is waited for has a folder of its own, and leaves no process behind.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_only

from lit_cifar.launch import startup
from lit_cifar.launch.node import reserved_port
from lit_cifar.launch.rendezvous import LOOPBACK

# Seconds in which the other ranks of a run must end, once one has failed: the same as under Lightning's launcher.
_FAREWELL_S = 5.0
_LONGEST_FOLDER = 70  # characters; with a folder and a name the path of a server's socket may have 107
_starting = threading.Lock()
_servers: dict[tuple[str, ...], forkserver.ForkServer] = {}
_running: set["ForkedRun"] = set()
_no_more_runs = threading.Event()  # set while none is wanted, not even one that is being started


class ForkedRun:
    """`python -m MODULE WORDS` in one process, or in several ranks with torchrun's environment.

    The processes are forked from one that has imported the modules `preload`. Each leads a session of its own, so that
    a signal to the session reaches all processes that it starts.
    Output is appended to the files `stdout` and `stderr`. With one rank, the strategy may start others.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        module: str,
        environment: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        num_ranks: int = 1,
        preload: Sequence[str] = (),
    ) -> None:
        with _rank_environments(environment, num_ranks) as environments:
            others = (str(stdout), str(stderr), str(Path.cwd()))
            run = (module, [*words])
            self._processes = [start_forked(_run, (*run, own, *others), preload=preload) for own in environments]

    @property
    def pids(self) -> list[int]:
        return [_pid(process) for process in self._processes]

    def wait(self, timeout_s: float) -> int | None:
        """The exit status: that of the first rank that fails, or 0; None after `timeout_s` seconds, while any runs."""
        deadline = time.monotonic() + timeout_s
        status = 0
        while alive := [process for process in self._processes if _exit_code(process) is None]:
            if time.monotonic() > deadline:
                return status or None
            wait([process.sentinel for process in alive], timeout=max(0.0, deadline - time.monotonic()))
            if status == 0 and (status := self._first_failure()):
                deadline = min(deadline, time.monotonic() + _FAREWELL_S)
        return status or self._first_failure()

    def _first_failure(self) -> int:
        return next((code for process in self._processes if (code := _exit_code(process))), 0)

    def kill(self) -> None:
        """End every process, and the processes that they have started."""
        for process in self._processes:
            below = []
            with suppress(psutil.Error):
                if _exit_code(process) is None:
                    below = psutil.Process(_pid(process)).children(recursive=True)  # also in sessions of their own
            for other in below:
                with suppress(psutil.Error):
                    other.kill()
            process.kill()  # the process may not lead its session yet
            with suppress(ProcessLookupError):
                os.killpg(_pid(process), signal.SIGKILL)
            wait([process.sentinel])


def _exit_code(process: ForkServerProcess) -> int | None:
    """The exit code of a process, None while it runs. Starting a process reads all exit codes, each of them once.

    The second reader would take the process for one whose fork server was killed, with exit code 255.
    """
    with _starting:
        return process.exitcode


def _pid(process: ForkServerProcess) -> int:
    assert process.pid is not None, "it has been started"  # a pid of 0 would be the group of this very process
    return process.pid


def start_forked(target: Callable[..., None], args: Sequence[Any], *, preload: Sequence[str] = ()) -> ForkServerProcess:
    """A new process that calls `target(*args)`, forked from one that has imported `preload`."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args)
    folder = tempfile.gettempdir()
    with (
        _starting,
        # The path of the server's socket may not be long.
        mock.patch.object(tempfile, "tempdir", folder if len(folder) <= _LONGEST_FOLDER else "/tmp"),
        mock.patch.object(forkserver, "connect_to_new_process", _server(tuple(preload)).connect_to_new_process),
    ):
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:  # otherwise the new process would import this one's program
            process.start()
        finally:
            sys.modules["__main__"] = main
    return process


def _server(preload: tuple[str, ...]) -> forkserver.ForkServer:
    """A fork server with these imports: multiprocessing's own has those of whoever was first to ask for a process."""
    if preload not in _servers:
        _servers[preload] = forkserver.ForkServer()
        _servers[preload].set_forkserver_preload(["lit_cifar.launch.server_start", __name__, *preload])
    with startup.interrupts_held():  # until it knows what to do
        _servers[preload].ensure_running()
    return _servers[preload]


@contextmanager
def _rank_environments(environment: Mapping[str, str], num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank. The ranks' port stays reserved until they have been started."""
    if num_ranks == 1:
        yield [dict(environment)]
        return
    with reserved_port(LOOPBACK) as port:
        size = str(num_ranks)
        common = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        yield [{**environment, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def _run(module: str, words: list[str], environment: Mapping[str, str], stdout: str, stderr: str, folder: str) -> None:
    """Turn a forked process into one that a user starts, and that ends with the process that has started it."""
    # The fork server ends when nobody has this pipe but the process that it serves; and then this one does.
    startup.die_with_parent()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, stream in ((stdout, 1), (stderr, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({**environment, startup.VARIABLE: str(os.getpid())})
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [module, *words]
    # The imports have read these from the environment of the fork server.
    rank_zero_only.rank = int(environment.get("RANK", 0))  # type: ignore[attr-defined]
    tempfile.tempdir = None
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # its launcher is no Python process
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        sys.excepthook(*sys.exc_info())  # the hook may have been replaced, and multiprocessing does not call it
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves these out


@dataclass(frozen=True)
class EndedRun:
    status: int | None  # exit status: of the first rank that failed, or 0; None if the run took too long
    stdout: str
    stderr: str
    seconds: float


def run(
    words: Sequence[str],
    *,
    module: str,
    folder: Path,
    limit_s: float,
    num_ranks: int = 1,
    threads: int = 1,
    variables: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> EndedRun:
    """Run `python -m MODULE WORDS` (see `ForkedRun`) to its end, or for `limit_s` seconds. Nothing of it stays running.

    Its output and temporary files are in `folder`, which exists. Each process has `threads`, and further `variables`.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    own = {"OMP_NUM_THREADS": str(threads), **(variables or {}), "TMPDIR": str(folder / "tmp")}
    environment = {**os.environ, **own}
    streams = {name: folder / name for name in ("stdout", "stderr")}
    for file in streams.values():
        file.write_text("")
    start = time.perf_counter()
    forked = ForkedRun(words, module=module, environment=environment, num_ranks=num_ranks, preload=preload, **streams)
    _running.add(forked)
    try:
        if _no_more_runs.is_set():
            forked.kill()
        status = forked.wait(limit_s)
    finally:
        forked.kill()
        _running.discard(forked)
    stdout, stderr = (file.read_text(errors="replace") for file in streams.values())
    return EndedRun(status, stdout, stderr, time.perf_counter() - start)


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
