"""Exchanges heartbeats over the process group's store, by a separate connection: two calls a rank and second.

A thread makes the calls. If the host at the other end is stopped or lost they do not return, whatever timeout torch's
`TCPStore` is given, and the watchdog's thread must not wait for that.
"""

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public

from lit_cifar.checks.watchdog.heartbeat import Heartbeat, first_heartbeat


class News(NamedTuple):
    """The result of an exchange."""

    sent: Heartbeat  # this process's heartbeat, which arrived before `beats` were read
    beats: list[Heartbeat]  # the latest heartbeat of each rank that this process reads, if that has written one


class HeartbeatStore:
    """A client of a store that all processes can reach, with a connection of its own, as calls may block it.

    `run` distinguishes this run's entries from those of others in the same store; `prepare` must have been called for
    it. Once the store is `lost` no more calls are made.
    """

    def __init__(self, store: Store, *, run: str, rank: int, world_size: int) -> None:
        self._store = _entries(store, run)
        self._keys = _keys(world_size)[1:] if rank == 0 else _keys(1)
        self._order = 0
        self.lost = self.busy = False
        self.answer_s = 0.0  # duration of the latest answer
        self._calls: queue.SimpleQueue[Heartbeat | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        threading.Thread(target=self._make_calls, name="watchdog-board", daemon=True).start()

    def exchange(self, beat: Heartbeat, *, wait_s: float) -> News | None:
        """Write a heartbeat and read those of others; None if the store does not answer within `wait_s`.

        While the store owes the answer to an earlier heartbeat, that is waited for and `beat` is not written.
        """
        if self.lost:
            return None
        if not self.busy:
            self._calls.put(beat)
            self.busy = True
        try:
            answer = self._answers.get(timeout=wait_s)
        except queue.Empty:
            return None
        self.busy = False
        return answer

    def close(self) -> None:
        """End the thread, once the store has answered its last call."""
        self._calls.put(None)

    def _exchange(self, beat: Heartbeat) -> News:
        if beat.failure and not self._order:
            self._order = self._store.add("failures", 1)
        self._store.set(f"beat{beat.rank}", replace(beat, order=self._order).to_json())
        return News(beat, [Heartbeat.from_json(text) for text in self._store.multi_get(self._keys) if text])

    def _make_calls(self) -> None:
        while not self.lost and (beat := self._calls.get()) is not None:
            begin = time.monotonic()
            try:
                news = self._exchange(beat)
                self.answer_s = time.monotonic() - begin
                self._answers.put(news)
            except DistNetworkError:
                self.lost = True  # torch does not connect again, and prints a page for each attempt
                self._answers.put(None)
            except RuntimeError:
                self._answers.put(None)


def prepare(store: Store, *, run: str, world_size: int) -> None:
    """Make the entries of a run, before any rank uses them: to read a key that is missing means to wait for it."""
    keys = _keys(world_size)
    _entries(store, run).multi_set(keys, [""] * world_size)  # type: ignore[attr-defined]  # not in torch's stubs
    _entries(store, run).check(keys)  # the answer comes after they have arrived


def _entries(store: Store, run: str) -> Store:
    return PrefixStore(f"lit_cifar/checks/watchdog/{run}", store)


def _keys(world_size: int) -> list[str]:
    return [f"beat{rank}" for rank in range(world_size)]


def meet(rank: int, world_size: int) -> tuple[HeartbeatStore, list[Heartbeat]]:
    """This process's store for the heartbeats of a new run, and every rank's first heartbeat. All ranks meet here."""
    # This is a new connection to the store at which this process has met the others.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store, run = TCPStore(address, port, is_master=False, wait_for_workers=False), uuid.uuid4().hex
    if rank == 0:
        prepare(store, run=run, world_size=world_size)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (run, first_heartbeat(rank)))
    board = HeartbeatStore(store, run=gathered[0][0], rank=rank, world_size=world_size)
    return board, [beat for _, beat in gathered]


# The most seconds that a pause between two reads counts, or a turn. During a longer one this process was not run, and
# has seen nothing.
_MOST_S = 2.0


class SilenceClock:
    """Counts the time in which a process that writes can be found silent by one that reads.

    Attributes:
        listened_s: Sum of the pauses from an answer of the store to the next question. The store's time for its answers
            is not in it: a slow store is not silence.
        owed_s: Seconds for which the store has owed its answer.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turn_at = self._answered_at = clock()
        self._pause_s = self.listened_s = self.owed_s = 0.0

    def turn(self, *, owed: bool) -> float:
        """Begin a turn of the reader, with the store's answer `owed` or not; returns the seconds since the last one."""
        now = self._clock()
        passed_s, self._turn_at = now - self._turn_at, now
        if owed:
            self.owed_s += min(passed_s, _MOST_S)
        else:
            self._pause_s = min(now - self._answered_at, _MOST_S)
        return passed_s

    def answer(self) -> None:
        self._answered_at, self.owed_s = self._clock(), 0.0
        self.listened_s += self._pause_s
