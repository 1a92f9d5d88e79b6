"""Whether a process whose main thread does not get on works all the same: it computes, or waits for a disk."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

# Of one processor. What hangs and looks around once in a while uses less, what computes on a crowded machine more.
_LEAST_SHARE = 0.05


class Use(NamedTuple):
    """What was seen of a process and of those that it has started.

    Attributes:
        cpu_s: Seconds of processors used so far, by pid.
        on_disk: Whether one of them waits for a disk.
    """

    cpu_s: Mapping[int, float]
    on_disk: bool


class Effort:
    """Of this process, looked at now and then.

    Of its own threads only the main one counts, as those of NCCL spin while they wait. Processes count that it has
    started, as compilers and loaders of data are, but not the other ranks.

    Args:
        peers: Pids of these.
        memory_s: How long an effort counts: compilers pause, and so do disks.
        clock: Seconds; monotonic.
        use: What is looked at.
    """

    def __init__(
        self,
        *,
        peers: Collection[int],
        memory_s: float,
        clock: Callable[[], float] = time.monotonic,
        use: Callable[[Collection[int]], Use] | None = None,
    ) -> None:
        self._peers = peers
        self._memory_s = memory_s
        self._clock = clock
        self._use = use or look
        self._last: tuple[float, Use] | None = None
        self._seen_at: float | None = None

    def look(self) -> None:
        """See what was done since the last look."""
        now, use = self._clock(), self._use(self._peers)
        if use.on_disk or (self._last is not None and _share(*self._last, now, use) >= _LEAST_SHARE):
            self._seen_at = now
        self._last = now, use

    def forget(self) -> None:
        """Begin anew: the main thread got on."""
        self._last = self._seen_at = None

    @property
    def seen(self) -> bool:
        """Whether there was some of late."""
        return self._seen_at is not None and self._clock() - self._seen_at <= self._memory_s


def look(peers: Collection[int]) -> Use:
    """What is seen of this process; nothing where the system does not show it."""
    cpu_s, on_disk = {}, False
    with suppress(psutil.Error, OSError):
        me = psutil.Process()
        cpu_s[me.pid] = sum(thread.user_time + thread.system_time for thread in me.threads() if thread.id == me.pid)
        on_disk = _is_on_disk(me)
        for process in _started_by(me, peers):
            with suppress(psutil.Error, OSError):
                times = process.cpu_times()
                cpu_s[process.pid] = times.user + times.system
                on_disk = on_disk or _is_on_disk(process)
    return Use(cpu_s, on_disk)


def _share(then: float, before: Use, now: float, after: Use) -> float:
    used_s = sum(max(0.0, used - before.cpu_s.get(pid, 0.0)) for pid, used in after.cpu_s.items())
    return used_s / max(now - then, 1e-3)


def _started_by(process: psutil.Process, peers: Collection[int]) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        for child in process.children():
            if child.pid not in peers:
                yield child
                yield from _started_by(child, peers)


def _is_on_disk(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_DISK_SLEEP)
