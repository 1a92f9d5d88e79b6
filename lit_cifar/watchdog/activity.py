"""What a main thread does that does not get on: it works, it waits for other processes, or neither."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

import psutil  # type: ignore[import-untyped]

# The main thread is in one of these while it waits for other processes, in backward too, where it computes as well.
_WAITING_MODULES = ("torch.distributed", "torch.nn.parallel", "torch.autograd")
# In the calls of this one it may spin meanwhile.
_COLLECTIVES = "torch.distributed.distributed_c10d"
# Of one processor. What hangs and looks around once in a while uses less, what computes on a crowded machine more.
_LEAST_SHARE = 0.05
_MAIN_THREAD = 0  # in place of a pid
# How the names of threads begin that do what the main thread would otherwise do itself, and may wait for.
HELPER = "lit_cifar-helper"


class Activity:
    """Of this process, looked at now and then.

    It works if it uses a processor or waits for a disk. Of its own threads only the main one and its helpers count, as
    those of NCCL spin while they wait. Processes count that it has started, as compilers and loaders of data are, but
    not the other ranks.

    Args:
        peers: Pids of these.
        memory_s: How long what was seen counts: compilers pause, and who has waited needs a moment to be seen working.
        clock: Seconds; monotonic.
    """

    def __init__(self, *, peers: Collection[int], memory_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._peers = peers
        self._memory_s = memory_s
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Begin anew: the main thread got on."""
        self._last: tuple[float, dict[int, float]] | None = None
        self._worked_at: float | None = None
        self._waited_at: float | None = None

    def look(self, module: str) -> None:
        """See what was done since the last look; the main thread is in a function of `module`."""
        now = self._clock()
        if self._makes_an_effort(now) and module != _COLLECTIVES:
            self._worked_at = now
        elif module.startswith(_WAITING_MODULES):
            self._waited_at = now

    @property
    def works(self) -> bool:
        """Whether it did of late."""
        return self._is_recent(self._worked_at)

    @property
    def waits(self) -> bool:
        """Whether it waited for other processes of late, and did not work."""
        return self._is_recent(self._waited_at) and not self.works

    def _is_recent(self, then: float | None) -> bool:
        return then is not None and self._clock() - then <= self._memory_s

    def _makes_an_effort(self, now: float) -> bool:
        used, on_disk = {_MAIN_THREAD: main_thread_s()}, False
        # A main thread that computes in Python makes every file that this thread reads take long: one look is enough.
        if not (much := self._is_much(used, now)):
            children, on_disk = children_s(self._peers)
            helpers, helper_on_disk = helpers_s()
            used |= children | helpers
            on_disk = on_disk or helper_on_disk
            much = self._is_much(used, now)
        self._last = now, used
        return much or on_disk

    def _is_much(self, used: dict[int, float], now: float) -> bool:
        if self._last is None:
            return False
        then, before = self._last
        gained = sum(seconds - before[key] for key, seconds in used.items() if key in before)
        return gained > _LEAST_SHARE * (now - then)


def main_thread_s() -> float:
    """Processor time of the main thread so far; of the whole process where the system does not tell them apart."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


def helpers_s() -> tuple[dict[int, float], bool]:
    """Processor time of this process's helper threads, by number, and whether one waits for a disk."""
    ids = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(HELPER)}
    used, on_disk = {}, False
    with suppress(psutil.Error, OSError):
        if ids:
            used = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}
            used = {number: seconds for number, seconds in used.items() if number in ids}
            on_disk = any(_is_on_disk(psutil.Process(number)) for number in used)
    return used, on_disk


def children_s(peers: Collection[int]) -> tuple[dict[int, float], bool]:
    """Processor time of the processes that this one has started, by pid, and whether one or this waits for a disk."""
    used, on_disk = {}, False
    with suppress(psutil.Error, OSError):
        me = psutil.Process()
        on_disk = _is_on_disk(me)
        for process in _started_by(me, peers):
            with suppress(psutil.Error, OSError):
                times = process.cpu_times()
                used[process.pid] = times.user + times.system
                on_disk = on_disk or _is_on_disk(process)
    return used, on_disk


def _started_by(process: psutil.Process, peers: Collection[int]) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        for child in process.children():
            if child.pid not in peers:
                yield child
                yield from _started_by(child, peers)


def _is_on_disk(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_DISK_SLEEP)
