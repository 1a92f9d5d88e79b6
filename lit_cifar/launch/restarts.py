"""The ranks of a run on this machine, forked from one process that has imported everything and read the data.

When a rank is lost all are forked again, as torchrun would start them, without the imports that take seconds.
"""

import gc
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from mmap import mmap
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_only

from lit_cifar.launch import startup
from lit_cifar.launch.network_interfaces import LOOPBACK
from lit_cifar.launch.node import reserved_port, torchrun_variables
from lit_cifar.launch.signals import EXIT_REFUSED, EXIT_STOPPED, ending, flush_streams, stop_signals

_FAREWELL_S = 30.0  # time for the other ranks to end once one has failed, as under torchrun
_POLL_S = 0.005
_excluded: mmap | None = None  # a byte for each rank, 1 if it is excluded


def exclude(rank: int) -> None:
    """Leave out a rank when all start again. This has no effect where ranks are not forked here."""
    if _excluded is not None:
        _excluded[rank] = 1


class ForkedRanks:
    """Forks ranks. Make it before anything is computed: neither threads, such as OpenMP's, nor a GPU survive a fork."""

    def __init__(self, *, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._stopped = False

    def fork(self, num_ranks: int, can_train: Callable[[int], bool]) -> list[int]:
        """Return in each rank, with the environment that torchrun would give it, the places of the ranks that take
        part.

        If ranks are excluded and the number of the others `can_train`, these go on; else all start again. In this
        process it raises SystemExit at the end of the run, with the status of the rank that has failed first.
        """
        global _excluded
        _excluded = mmap(-1, num_ranks)  # the ranks share it
        places = [*range(num_ranks)]
        gc.freeze()  # otherwise a collection in a rank would write to all objects, and so copy them
        with _blocked({signal.SIGCHLD, *stop_signals()}) as signals:
            for restarts in range(self.max_restarts + 1):
                if restarts:
                    _say(f"start {restarts} of {self.max_restarts} after a failure")
                with reserved_port(LOOPBACK) as port:
                    running: dict[int, int] = {}  # pids by rank
                    for rank in range(len(places)):
                        variables = torchrun_variables(
                            (LOOPBACK, port), local_rank=rank, num_local=len(places), restarts=restarts
                        )
                        running[rank] = self._fork_one(rank, variables)
                        if not running[rank]:
                            return places
                    status = self._wait(running, signals)
                left = [place for rank, place in enumerate(places) if not _excluded[rank]]
                _excluded[:] = bytes(num_ranks)
                if self._stopped or status in (0, EXIT_REFUSED, EXIT_STOPPED):
                    break
                if len(left) < len(places) and not (left and can_train(len(left))):
                    _say(f"{len(left)} of {len(places)} ranks cannot share the batch, so all start again")
                else:
                    places = left
        raise SystemExit(status)

    def await_first(self) -> None:
        """Wait until the first rank listens: torch would wait at least 0.3 s after a refused connection."""
        while os.environ["RANK"] != "0":
            with suppress(OSError), socket.create_connection((LOOPBACK, int(os.environ["MASTER_PORT"]))):
                return
            time.sleep(_POLL_S)

    def _fork_one(self, rank: int, variables: dict[str, str]) -> int:
        """The pid of the new process; 0 in that process."""
        flush_streams()
        parent = os.getpid()
        if pid := os.fork():
            return pid
        startup.die_with_parent()  # the lock of the run folder is then free for the same command
        if os.getppid() != parent:
            os._exit(1)
        os.environ |= variables
        Path("/proc/self/comm").write_text(f"rank {rank}")  # its name in ps and top
        rank_zero_only.rank = rank  # type: ignore[attr-defined]
        torch.set_num_threads(self._num_threads)
        return 0

    def _wait(self, running: dict[int, int], signals: set[signal.Signals]) -> int:
        """Wait until all ranks have ended. Return 0, or the status of the first that has failed.

        If that rank was killed the others are killed at once, because they could only wait for it. Otherwise they are
        asked to end, as by torchrun, and may first write what they have begun.
        """
        status, deadline = 0, math.inf
        while running:
            found = signal.sigtimedwait(signals, max(0.0, min(deadline - time.monotonic(), 3600.0)))
            if found is not None and found.si_signo != signal.SIGCHLD:
                self._stopped = True
                _send(found.si_signo, running.values())
            for rank, pid in list(running.items()):
                ended, raw = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                del running[rank]
                code = os.waitstatus_to_exitcode(raw)
                if code and not status:
                    status = 128 - code if code < 0 else code
                    deadline = time.monotonic() + (0.0 if code < 0 else _FAREWELL_S)
                    _send(signal.SIGTERM, running.values())
                    if code not in (EXIT_REFUSED, EXIT_STOPPED):
                        _say(f"rank {rank} (pid {pid}) has ended with {ending(code)}")
            if time.monotonic() >= deadline:
                _send(signal.SIGKILL, running.values())
                deadline = math.inf
        return status


@contextmanager
def _blocked(signals: set[signal.Signals]) -> Iterator[set[signal.Signals]]:
    """Hold back signals until they are asked for. A rank that is forked leaves this block, and gets them again."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield signals
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, number)  # a process that has ended still waits for `waitpid`


def _say(text: str) -> None:
    print(f"lit_cifar: {text}", file=sys.stderr, flush=True)
