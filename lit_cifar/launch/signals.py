"""The end of a process: together with others, by Ctrl-C, or as one of `ddp_spawn`; and handlers to put back."""

import atexit
import gc
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch import multiprocessing as torch_multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException

from lit_cifar import internals
from lit_cifar.errors import Stopped, printable
from lit_cifar.launch import startup

EXIT_REFUSED = 2  # exit status after a mistake of the user
EXIT_STOPPED = 128 + signal.SIGTERM
EXIT_INTERRUPTED = 128 + signal.SIGINT
_ONE_KEYSTROKE_S = 1.0
multiprocessing: Any = torch_multiprocessing  # its types leave out `start_processes`


class Keystrokes:
    """Distinguishes a second Ctrl-C from one that arrives twice, from the terminal and from the parent process."""

    def __init__(self) -> None:
        self._first_at = math.inf

    @property
    def any(self) -> bool:
        return self._first_at < math.inf

    def insist(self, number: int) -> bool:
        """Whether signal `number`, which has just arrived, is a second Ctrl-C."""
        now = time.monotonic()
        if number == signal.SIGINT:
            self._first_at = min(self._first_at, now)
        return number == signal.SIGINT and now - self._first_at > _ONE_KEYSTROKE_S


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop; without SIGHUP, of a closed terminal, where `nohup` ignores it."""
    is_heard = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if is_heard else [])]


@contextmanager
def handlers_put_back() -> Iterator[None]:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: handler for number in signals if (handler := signal.getsignal(number)) is not None}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def signals_to_spawned(trainer: Trainer) -> Iterator[None]:
    """Forward a request to stop to the processes of `ddp_spawn`, and take over their exit status.

    While they are being started, and at a second Ctrl-C, they are killed at once.
    """
    launcher = trainer.strategy.launcher
    if isinstance(launcher, internals.SubprocessScriptLauncher):
        launcher._call_children_scripts = startup.interrupts_held()(launcher._call_children_scripts)
    if not isinstance(launcher, internals.MultiProcessingLauncher):
        yield
        return
    keystrokes, spawning = Keystrokes(), logging.getLogger("torch.multiprocessing.spawn")
    start = multiprocessing.start_processes

    def start_all(*args: Any, **kwargs: Any) -> Any:
        with startup.interrupts_held():
            started = start(*args, **kwargs)
        signal.signal(signal.SIGINT, stop)
        return started

    def stop(number: int, frame: FrameType | None) -> None:
        spawning.disabled = True  # it would name each process that it ends because of this
        if launcher.procs and not keystrokes.insist(number):
            launcher.kill(signal.SIGTERM)
            return
        for process in active_children():  # the launcher knows its processes only when it has started all
            process.kill()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with handlers_put_back():
        for number in {*stop_signals()} - startup.ENDS_AT:
            signal.signal(number, stop)
        multiprocessing.start_processes = start_all
        try:
            yield
        except ProcessExitedException as error:
            if error.exit_code == EXIT_INTERRUPTED or (error.exit_code == -signal.SIGTERM and keystrokes.any):
                raise KeyboardInterrupt from None  # before the training had begun
            if error.exit_code not in (EXIT_STOPPED, -signal.SIGTERM):  # SIGTERM came before its handler was installed
                raise
            raise SystemExit(EXIT_STOPPED) from None
        finally:
            multiprocessing.start_processes, spawning.disabled = start, False


def end_together(trainer: Trainer, message: str, *, status: int) -> NoReturn:
    """Print `message` on rank 0, and exit; every process must call this."""
    if trainer.is_global_zero:
        print(printable(f"lit_cifar: {message}", lines=True), file=sys.stderr, flush=True)
    with suppress(Exception):  # rank 0 has printed the reason; the others need not be reachable
        trainer.strategy.barrier("end")
    # Lightning's launcher kills the user's process when one that it started fails.
    raise Stopped(0 if launched_by_lightning(trainer) else status)


def launched_by_lightning(trainer: Trainer) -> bool:
    """Whether Lightning's launcher has started this process as a copy of the user's, and not the user's shell."""
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy) or not isinstance(strategy.cluster_environment, LightningEnvironment):
        return False
    is_copied = isinstance(strategy.launcher, internals.SubprocessScriptLauncher) and startup.STARTED_BY_COPY
    return is_copied and trainer.local_rank > 0


def destroy_process_group_at_exit() -> None:
    """Destroy the default process group and all others, if there are any.

    Lightning does this for NCCL only. A gloo group that is still there when the interpreter shuts down can abort a run
    that had finished ("terminate called without an active exception", SIGABRT): its threads may then release the last
    reference to a tensor, for which they need an interpreter that is gone (pytorch/pytorch#179291).
    """
    if dist.is_available() and dist.is_initialized():
        # A group's threads end with the last reference to it. Trainers in reference cycles and frames of errors hold
        # some. Drop these first: only torch's own release of a group waits for the threads without holding the GIL.
        sys.last_value = sys.last_traceback = None
        gc.collect()
        dist.destroy_process_group()


atexit.register(destroy_process_group_at_exit)  # the callbacks of every process of a run import this file
