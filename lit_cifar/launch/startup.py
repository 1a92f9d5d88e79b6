"""The start of a process: who has started it, and imports without Python's garbage collector.

The parent is noted before the imports that take seconds, during which it may be killed.
"""

import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PARENT_PID = os.getppid()

# By then a watchdog has noticed it and has reported more.
_GRACE_S = 10.0
_started = threading.Event()


def exit_with_parent() -> None:
    """End this process some seconds after the one that started it is gone. Call it early; a second call has no effect.

    Lightning's launcher, torch.multiprocessing and torchrun's agent end the processes that they have started, unless
    they are killed themselves. Their processes would then continue, or wait half an hour for others that never start.
    """
    if not _started.is_set():
        _started.set()
        spawned_by = multiprocessing.parent_process()
        launcher = PARENT_PID if spawned_by is None else spawned_by.pid
        threading.Thread(target=_follow, args=(launcher,), name="watchdog-launcher", daemon=True).start()


def _follow(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    time.sleep(_GRACE_S)
    print(f"lit_cifar: pid {os.getpid()} stops: pid {launcher}, which started it, is gone", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Let the collector wait while imports are made: they leave a million objects and no garbage.

    Looking through these again and again takes a fifth of the imports. Afterwards they are in its oldest generation. As
    young ones it would look through them twice within a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # what somebody has frozen stays so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if was_enabled:
            gc.enable()
