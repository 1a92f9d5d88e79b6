"""Exchanges heartbeats and a verdict over the process group's store, by a separate connection.

A thread makes the calls. If the host at the other end is stopped or lost they do not return, whatever timeout torch's
`TCPStore` is given, and the watchdog's thread must not wait for that.
"""

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not named in its __all__
    DistNetworkError,
    PrefixStore,
    Store,
    TCPStore,
)

from lit_cifar.watchdog.diagnosis import Verdict
from lit_cifar.watchdog.heartbeat import Heartbeat


class News(NamedTuple):
    """The result of an exchange."""

    beats: list[Heartbeat]  # the latest heartbeat of each rank; empty until every rank has sent one
    verdict: Verdict | None  # the verdict of one of the processes, if there is one


class HeartbeatStore:
    """A client of a store that all processes can reach, with a connection of its own, as calls may block it.

    `run` distinguishes this run's entries from those of others in the same store. Once the store is `lost` no more
    calls are made.
    """

    def __init__(self, store: Store, *, run: str, world_size: int) -> None:
        self._store = PrefixStore(f"lit_cifar/watchdog/{run}", store)
        self._keys = [f"beat{rank}" for rank in range(world_size)]
        self._complete = False
        self._order = 0
        self.lost = self._busy = False
        self._calls: queue.SimpleQueue[Callable[[], News] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        threading.Thread(target=self._make_calls, name="watchdog-board", daemon=True).start()

    def exchange(self, beat: Heartbeat, *, wait_s: float) -> News | None:
        """Send a heartbeat and read those of the others; None if the store does not answer within `wait_s`."""
        return self._call(lambda: self._exchange(beat), wait_s)

    def publish(self, verdict: Verdict, *, wait_s: float) -> Verdict:
        """Publish a verdict; returns an earlier one of another process if there is one."""
        news = self._call(lambda: self._publish(verdict), wait_s)
        return verdict if news is None or news.verdict is None else news.verdict

    def close(self) -> None:
        """End the thread, once the store has answered its last call."""
        self._calls.put(None)

    def _exchange(self, beat: Heartbeat) -> News:
        if beat.failure and not self._order:
            self._order = self._store.add("failures", 1)
        self._store.set(f"beat{beat.rank}", replace(beat, order=self._order).to_json())
        if not self._complete:
            self._store.compare_set("verdict", "", "")
            self._complete = self._store.check(self._keys)
            return News([], None)
        *beats, verdict = self._store.multi_get([*self._keys, "verdict"])
        return News([Heartbeat.from_json(text) for text in beats], Verdict.from_json(verdict) if verdict else None)

    def _publish(self, verdict: Verdict) -> News:
        return News([], Verdict.from_json(self._store.compare_set("verdict", "", verdict.to_json())))

    def _call(self, call: Callable[[], News], wait_s: float) -> News | None:
        late = self._busy
        if self.lost:
            return None
        if not late:
            self._calls.put(call)
        try:
            answer = self._answers.get(timeout=wait_s)
        except queue.Empty:
            self._busy = True
            return None
        self._busy = False
        return None if late else answer  # a late answer belongs to an earlier call

    def _make_calls(self) -> None:
        while not self.lost and (call := self._calls.get()) is not None:
            try:
                self._answers.put(call())
            except DistNetworkError:
                self.lost = True  # torch does not connect again, and prints a page for each attempt
                self._answers.put(None)
            except RuntimeError:
                self._answers.put(None)


def connect() -> Store:
    """A connection of its own to the store at which this process has met the others."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)


def host_of_store() -> int | None:
    """The rank whose process serves the store; None for spawned processes, whose parent serves it."""
    return None if multiprocessing.parent_process() is not None else 0
