"""Exchanges heartbeats over the process group's store, by a separate connection: two calls a rank and second.

A thread makes the calls. If the host at the other end is stopped or lost they do not return, whatever timeout torch's
`TCPStore` is given, and the watchdog's thread must not wait for that.
"""

import os
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public

from lit_cifar.checks.watchdog.heartbeat import Heartbeat, this_process


class HeartbeatStore:
    """A client of a store that all processes can reach; `prepare` must have been called for that.

    Once the store is `lost` no more calls are made.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._keys = _keys(world_size)[1:] if rank == 0 else _keys(1)
        self._order = 0
        self._call: Future[list[Heartbeat]] | None = None
        self.lost = False
        self.answer_s = 0.0  # duration of the latest answer

    def exchange(self, beat: Heartbeat, *, wait_s: float) -> list[Heartbeat]:
        """Write a heartbeat, then read the latest of each other rank that this process reads.

        Return the one that has arrived and those that were read; none if the store does not answer within `wait_s`.
        While it owes the answer to an earlier heartbeat, that is waited for and `beat` is not written.
        """
        if self.lost:
            return []
        if self._call is None:
            self._call = Future()
            threading.Thread(target=self._answer, args=(beat, self._call), name="watchdog-store", daemon=True).start()
        call = self._call
        try:
            error = call.exception(wait_s)
        except TimeoutError:
            return []
        self._call = None
        self.lost = isinstance(error, DistNetworkError)  # torch does not connect again, and prints a page at each try
        return [] if error is not None else call.result()

    def _answer(self, beat: Heartbeat, call: "Future[list[Heartbeat]]") -> None:
        begin = time.monotonic()
        try:
            beats = self._exchange(beat)
        except RuntimeError as error:
            call.set_exception(error)
        else:
            self.answer_s = time.monotonic() - begin
            call.set_result(beats)

    def _exchange(self, beat: Heartbeat) -> list[Heartbeat]:
        if beat.failure is not None and not self._order:
            self._order = self._store.add("failures", 1)
        beat = replace(beat, order=self._order)
        self._store.set(f"beat{beat.rank}", beat.to_json())
        return [beat, *(Heartbeat.from_json(text) for text in self._store.multi_get(self._keys) if text)]


def prepare(store: Store, *, world_size: int) -> None:
    """Make the entries of a run, before any rank uses them: to read a key that is missing means to wait for it."""
    keys = _keys(world_size)
    store.multi_set(keys, [""] * world_size)  # type: ignore[attr-defined]  # not in torch's stubs
    store.check(keys)  # the answer comes after they have arrived


def _keys(world_size: int) -> list[str]:
    return [f"beat{rank}" for rank in range(world_size)]


def meet(rank: int, world_size: int) -> tuple[HeartbeatStore, list[Heartbeat]]:
    """This process's store for the heartbeats of a new run, and all processes. They meet here."""
    # This is a new connection to the store at which this process has met the others.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    connection = TCPStore(address, port, is_master=False, wait_for_workers=False)
    run = f"lit_cifar/watchdog/{uuid.uuid4().hex}"  # other runs may use the same store
    if rank == 0:
        prepare(PrefixStore(run, connection), world_size=world_size)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (run, this_process(rank)))
    store = PrefixStore(gathered[0][0], connection)
    return HeartbeatStore(store, rank=rank, world_size=world_size), [process for _, process in gathered]
