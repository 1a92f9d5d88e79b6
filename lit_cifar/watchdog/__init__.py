"""Finds the process of a run that died or hangs, says which one, and ends the others.

A collective operation waits for every process. Where one has died the others learn it from a broken connection, if at
all: not from a stopped process, a lost machine or a main thread that hangs, for which torch waits 10 to 30 minutes.
torchrun's agent restarts what has died but takes what hangs for healthy. So each process has a thread that tells the
others once a second how far its main thread is (`Beat`), over the store at which they have met, and judges what it
hears from them (`judge`). See `Watch`.
"""

from lit_cifar.watchdog.activity import HELPER
from lit_cifar.watchdog.beat import Beat
from lit_cifar.watchdog.board import Board, connect, host_of_store
from lit_cifar.watchdog.judge import Verdict
from lit_cifar.watchdog.launcher import end_with_launcher
from lit_cifar.watchdog.progress import Progress
from lit_cifar.watchdog.watch import Watch, first_beat

__all__ = [
    "HELPER",
    "Beat",
    "Board",
    "Progress",
    "Verdict",
    "Watch",
    "connect",
    "end_with_launcher",
    "first_beat",
    "host_of_store",
]
