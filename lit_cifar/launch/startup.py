"""The start of a process: its parent and its streams.

Both are looked at before the imports that take seconds: during these the parent may be killed, and files are opened.
"""

import multiprocessing
import os
import sys
import threading
import time
from functools import cache

PARENT_PID = os.getppid()

# By then a watchdog has noticed that the parent is gone, and has reported more.
_GRACE_S = 10.0


def open_closed_streams() -> None:
    """Open stdin, stdout and stderr at `/dev/null` where the caller has closed them.

    Otherwise the next file to be opened would take their place, and get what libraries and processes print.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)  # it gets the lowest free number


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
    """
    spawned_by = multiprocessing.parent_process()
    launcher = PARENT_PID if spawned_by is None else spawned_by.pid
    threading.Thread(target=_follow, args=(launcher,), name="watchdog-launcher", daemon=True).start()


def _follow(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    time.sleep(_GRACE_S)
    print(f"lit_cifar: pid {os.getpid()} stops: pid {launcher}, which started it, is gone", file=sys.stderr, flush=True)
    kill_workers()
    os._exit(1)
