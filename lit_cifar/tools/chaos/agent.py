"""torchrun, but that it forks most of its workers instead of starting Python for each.

The arguments, the rendezvous, signals and restarts are torchrun's own. A worker finds what one finds that has started
by itself, see `lit_cifar.launch.forked`. To be run as a module, with torchrun's arguments.
"""

import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lit_cifar.launch.forked import run_module
from lit_cifar.tools.chaos.job import ANEW, WORKERS, Worker, is_anew
from lit_cifar.tools.chaos.sample_log import start_of

_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # by torchrun, beside SIGINT


class Handler(SubprocessHandler):
    """Starts a worker, by a fork or as a new Python, and records it."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        start, at_s = start_of(env), time.monotonic()
        anew = is_anew(start, int(env[ANEW]))
        process = super()._popen(args, env) if anew else _Forked(args[args.index("-m") + 1 :], env)
        Worker(start=start, rank=int(env["RANK"]), pid=process.pid, anew=anew, at_s=at_s).write(Path(env[WORKERS]))
        return process


class _Forked:
    """`python -m WORDS` in a fork of this process: what torchrun needs of a `Popen`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=_work, args=(words, environment))
        self._process.start()
        self.pid = self._process.pid or 0
        while self.poll() is None and os.getsid(self.pid) != self.pid:  # torchrun's signals go to its group
            time.sleep(0.001)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise TimeoutExpired("fork", timeout or 0.0)
        return status


def _work(words: Sequence[str], environment: Mapping[str, str]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    _close_sockets()
    run_module(words[0], words[1:], environment)


def _close_sockets() -> None:
    """Those of torchrun's store, as starting Python does: else they outlive torchrun. Nothing here uses them."""
    for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)


if __name__ == "__main__":
    api.get_subprocess_handler = Handler  # type: ignore[attr-defined, assignment]  # which it has imported
    run.main()
