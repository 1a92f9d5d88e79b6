"""Finds the process of a run that died or hangs, reports which one, and ends the others.

A collective operation waits for every process. If one has died, the others may notice a broken connection. They do not
notice a stopped process, a lost machine or a main thread that hangs: torch then waits 10 to 30 minutes. The agent of
torchrun restarts processes that have died, but not those that hang. So each process has a thread that sends the others
a heartbeat once a second, with the progress of its main thread (`Beat`), over the store at which they have met. It also
judges the heartbeats of the others (`judge`). See `Watch`.
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
