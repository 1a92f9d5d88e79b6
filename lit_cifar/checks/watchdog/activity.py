"""The main thread's phase, how long that may take, and, without progress, whether the thread works or waits."""

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from lit_cifar.checks.watchdog import HELPER

# A phase that runs for the first time may compile, tune or load, so its duration cannot be predicted. The same holds
# while a process computes or waits for a disk. Ten minutes are torch's own limit for a collective operation of NCCL.
FIRST_TIME_S = 600.0
# A phase that takes longer than this multiple of the longest one of its kind counts as hung.
FACTOR = 5.0
# The first phase of a kind is often the longest by far. It counts until this many others are known.
_NUM_SETTLED = 3


class Moment(NamedTuple):
    phase: str  # name of the phase, such as "training step"
    step: int  # optimizer steps that are done
    events: int  # number of phases begun so far, by which processes are compared
    since: float  # start of this phase on this process's monotonic clock, in seconds
    shape: Hashable = None  # shape of the newest batch. With a new shape the same phase may compile again.

    @property
    def kind(self) -> Hashable:
        """Key of the phases that should take equally long."""
        return self.phase, self.shape


class _Durations(NamedTuple):
    number: int
    first: float
    longest_other: float = 0.0


class PhaseTimer:
    """Times phases. The main thread writes, another one reads; `moment` is replaced as a whole, without a lock."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.moment = Moment("starting", 0, 0, clock())
        self._durations: dict[Hashable, _Durations] = {}
        self._awake_since = self.moment.since

    def enter(self, phase: str, *, step: int = 0, shape: Hashable = None) -> None:
        """Note that the main thread begins `phase`; pass `shape` if it has changed."""
        last, now = self.moment, self.clock()
        duration_s = now - max(last.since, self._awake_since)
        known = self._durations.get(last.kind, _Durations(0, duration_s))
        longest_s = max(known.longest_other, duration_s) if known.number else 0.0
        self._durations[last.kind] = _Durations(known.number + 1, known.first, longest_s)
        self.moment = Moment(phase, step, last.events + 1, now, last.shape if shape is None else shape)

    def forgive(self) -> None:
        """Restart the timing: the whole process was suspended."""
        self._awake_since = self.clock()

    def idle_s(self) -> float:
        return self.clock() - max(self.moment.since, self._awake_since)

    def expected_s(self) -> float:
        """Seconds that this phase may take, going by its earlier durations."""
        known = self._durations.get(self.moment.kind)
        if known is None:
            return FIRST_TIME_S
        return FACTOR * max(known.longest_other, known.first if known.number <= _NUM_SETTLED else 0.0)


# The main thread is in one of these while it waits for other processes. In backward it computes there too.
_WAITING_MODULES = ("torch.distributed", "torch.nn.parallel", "torch.autograd")
# In calls of this module the main thread may use the processor while it waits.
_COLLECTIVES = "torch.distributed.distributed_c10d"
# Share of one processor. A thread that hangs but polls uses less, one that computes on a busy machine uses more.
_LEAST_SHARE = 0.05


@dataclass(kw_only=True)
class Activity:
    """The activity of this process, sampled now and then.

    The process works if it uses a processor or waits for a disk, see `effort`. An observation counts for `memory_s`:
    compilers pause, and after waiting it takes a moment until work is observed. `peers` are the pids of the ranks.

    With `on_gpu` a main thread that uses a processor and stays at one place waits for its GPU, and so for a collective
    operation that is stuck there: CUDA spins meanwhile. Without a GPU it computes, such as in backward.
    """

    peers: Collection[int]
    memory_s: float
    on_gpu: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset: the main thread has made progress."""
        self._last_main_s = self._last_others_s = self._last_at = math.inf
        self._last_stack = ""
        self._worked_at = self._waited_at = -math.inf

    def look(self, stack: str, module: str) -> None:
        """Observe the activity since the last call; `stack` and `module` are those of the main thread's `stack_of`."""
        now, (main_s, others_s, on_disk) = self.clock(), effort(self.peers)
        least_s = _LEAST_SHARE * (now - self._last_at)
        of_main_s, of_others_s = main_s - self._last_main_s, others_s - self._last_others_s
        spins = self.on_gpu and stack == self._last_stack and of_main_s > least_s
        much = of_others_s + (0.0 if spins else of_main_s) > least_s
        self._last_main_s, self._last_others_s, self._last_at, self._last_stack = main_s, others_s, now, stack
        if (much or on_disk) and module != _COLLECTIVES:
            self._worked_at = now
        elif spins or module.startswith(_WAITING_MODULES):
            self._waited_at = now

    @property
    def works(self) -> bool:
        return self.clock() - self._worked_at <= self.memory_s

    @property
    def waits(self) -> bool:
        return self.clock() - self._waited_at <= self.memory_s and not self.works


def effort(peers: Collection[int]) -> tuple[float, float, bool]:
    """Processor time in seconds of the main thread, and of others that work for this process's training.

    The others are the main thread's helpers, but not NCCL's threads, which use a processor while they wait, and the
    processes that this one has started, such as compilers and data loaders, but not the other ranks, whose pids are
    `peers`. The last value is whether one of all waits for a disk.
    """
    main_s, others_s, on_disk = 0.0, 0.0, False
    main = os.getpid()  # `native_id` of a main thread that has been forked is that of its parent
    own = {main} | {thread.native_id for thread in threading.enumerate() if thread.name.startswith(HELPER)}
    with suppress(psutil.Error, OSError):
        me = psutil.Process()
        times = {each.id: each.user_time + each.system_time for each in me.threads() if each.id in own}
        main_s = times.pop(main, 0.0)
        others_s = sum(times.values())
        for process in (*map(psutil.Process, own), *_started_by(me, peers)):
            with suppress(psutil.Error, OSError):
                on_disk = on_disk or process.status() == psutil.STATUS_DISK_SLEEP
                if process.pid not in own:
                    used = process.cpu_times()
                    others_s += used.user + used.system
    return main_s, others_s, on_disk


def _started_by(process: psutil.Process, peers: Collection[int]) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        for child in process.children():
            if child.pid not in peers:
                yield child
                yield from _started_by(child, peers)
