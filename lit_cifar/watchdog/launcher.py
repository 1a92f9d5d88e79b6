"""A process does not outlive the one that started it to take part in a run."""

import multiprocessing
import os
import sys
import threading
import time

from lit_cifar import parent

# A watch has found out by then, and says more.
_GRACE_S = 10.0
_started = threading.Event()


def end_with_launcher() -> None:
    """End this process some seconds after the one that started it is gone. To be called early; once is enough.

    Lightning's launcher, torch.multiprocessing and torchrun's agent end what they have started, unless they are killed
    themselves. What they leave then goes on or, before the processes have met, waits half an hour for the others.
    """
    if not _started.is_set():
        _started.set()
        spawned_by = multiprocessing.parent_process()
        launcher = parent.PARENT_PID if spawned_by is None else spawned_by.pid
        threading.Thread(target=_follow, args=(launcher,), name="watchdog-launcher", daemon=True).start()


def _follow(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    time.sleep(_GRACE_S)
    print(f"lit_cifar: pid {os.getpid()} stops: pid {launcher}, which started it, is gone", file=sys.stderr, flush=True)
    os._exit(1)
