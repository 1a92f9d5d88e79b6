"""The start of a process: its parent, its streams, and Ctrl-C.

All are looked at before the imports that take seconds: during these the parent may be killed, and files are opened.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

PARENT_PID = 0  # of the process that has started this one
# Whether that one has this file too, as one that starts copies of itself has; a shell has not, and may exit early.
STARTED_BY_COPY = False
VARIABLE = "_LIT_CIFAR_PID"
_PR_SET_PDEATHSIG = 1
ENDS_AT: set[int] = set()  # the signal at which this process, and so every copy of it, ends as below
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # Lightning reads these, in this order

# By then a watchdog has noticed that the parent is gone, and has reported more.
_GRACE_S = 10.0


def note_parent() -> None:
    """Note who has started this process, and tell those that it starts who it is."""
    global PARENT_PID, STARTED_BY_COPY
    PARENT_PID = os.getppid()
    STARTED_BY_COPY = os.environ.get(VARIABLE) == str(PARENT_PID)
    os.environ[VARIABLE] = str(os.getpid())


note_parent()
os.register_at_fork(after_in_child=note_parent)


def open_closed_streams() -> None:
    """Open stdin, stdout and stderr at `/dev/null` where the caller has closed them.

    Otherwise the next file to be opened would take their place, and get what is printed; Python would lack a stream.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
            setattr(sys, name, os.fdopen(number, mode))


def kill_workers() -> None:
    """Kill the daemonic processes that this one has started, before `os._exit`: Python ends them at an exit only.

    A hanging worker of a data loader would stay, because it looks for its parent only between two batches.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


@cache
def exit_with_parent() -> None:
    """End this process some seconds after the one that started it is gone. Call it early; a second call has no effect.

    Lightning's launcher, torch.multiprocessing and torchrun's agent end the processes that they have started, unless
    they are killed themselves. The processes would then continue, or wait half an hour for others that never start.
    A spawned process ends at once: its parent is no rank that a watchdog could report, and holds the run folder.
    """
    threading.Thread(target=_end_after, args=(PARENT_PID,), name="watchdog-launcher", daemon=True).start()


def _end_after(starter: int) -> None:
    if (process := multiprocessing.parent_process()) is not None:
        process.join()  # the kernel's parent of this process may be a fork server
    else:
        while os.getppid() == starter:
            time.sleep(1.0)
        time.sleep(_GRACE_S)
        told = f"lit_cifar: pid {os.getpid()} stops: pid {starter}, which started it, is gone"
        print(told, file=sys.stderr, flush=True)
    kill_workers()
    os._exit(1)


def die_with_parent() -> None:
    """Let the kernel end this process together with the thread that has started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_at_interrupt() -> None:
    """End this process at Ctrl-C, with status 130 and one line, until a training has handlers of its own.

    Python's own way is an exception of the main thread, which shows as a traceback where an import is interrupted, and
    comes late where a process waits for others in C++. So a thread ends the process, and those that it has started.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGINT, _leave_to_thread)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=raise_at_interrupt)
    # multiprocessing's tracker, which clears up after this end, is started with these.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    threading.Thread(target=_end_at_interrupt, args=(read,), name="interrupts", daemon=True).start()
    ENDS_AT.add(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS_AT)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back in copies of this process while they begin, and would show a traceback; and here meanwhile."""
    resource_tracker.ensure_running()  # its start would let the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS_AT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raise_at_interrupt(handler: Any = signal.default_int_handler) -> None:
    """Let Ctrl-C be an exception of this process again, by `handler`."""
    if signal.getsignal(signal.SIGINT) is _leave_to_thread:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, handler)


def raise_once(number: int, frame: FrameType | None) -> None:
    """Raise at the first Ctrl-C: a second one would cut short the end of what this process has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _interrupt_children()
    raise KeyboardInterrupt


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    pass


def _end_at_interrupt(read: int) -> None:
    while os.read(read, 1) != bytes([signal.SIGINT]) or signal.getsignal(signal.SIGINT) is not _leave_to_thread:
        pass
    kill_workers()
    _interrupt_children()
    is_first = all(os.environ.get(name, "0") == "0" for name in RANKS) and multiprocessing.parent_process() is None
    if is_first:
        with suppress(AttributeError, OSError, ValueError):
            print("lit_cifar: interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)


def _interrupt_children() -> None:
    """Interrupt what this process has started, as a terminal does: others send the signal to one process alone."""
    for task in Path("/proc/self/task").glob("*/children"):
        for child in task.read_text().split():
            with suppress(OSError):  # one that is spawned would show that it is cut off
                is_spawned = b"--multiprocessing-fork" in Path("/proc", child, "cmdline").read_bytes()
                os.kill(int(child), signal.SIGKILL if is_spawned else signal.SIGINT)
