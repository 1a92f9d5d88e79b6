"""Probes every ordered pair of devices, in a process that may hang and be killed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch

from lit_cifar.copy_probe.copy_fault import CopyFault
from lit_cifar.copy_probe.pair_check import Load, Pair, PairCheck, Place, places
from lit_cifar.copy_probe.probe_process import START_S, ProbeError, reason, received, worker
from lit_cifar.copy_probe.transport import DeviceTransport, Transport

SIZES = tuple(2**exponent for exponent in range(12, 27, 2))
"""4 KiB to 64 MiB, in bytes; sizes are multiples of 16."""
SHORT_SIZES = (2**12, 2**20, 2**24)
"""For the probe before a training."""


def probe(
    devices: Sequence[torch.device],
    *,
    transport: Transport | None = None,
    sizes: Sequence[int] = SIZES,
    repeats: int = 3,
    limit_s: float = 60.0,
) -> list[CopyFault]:
    """The faults of copies between `devices`; an empty list if all copies arrived.

    Each ordered pair is probed while the devices are idle. Then those without a fault are probed under load.

    Args:
        devices: At least two. On the CPU they are virtual and named cpu:0, cpu:1 and so on.
        transport: What copies; by default torch, once by copy engine and once by a kernel.
        sizes: Bytes of a copy, multiples of 16.
        repeats: How often each copy is made idle, and how often under load.
        limit_s: Time for all copies of a pair. A pair that takes longer has hung.

    Raises:
        ProbeError: The process that copies could not start, or the devices have too little free memory.
    """
    return [*faults_of(devices, transport=transport, sizes=sizes, repeats=repeats, limit_s=limit_s)]


def faults_of(
    devices: Sequence[torch.device],
    *,
    transport: Transport | None = None,
    sizes: Sequence[int] = SIZES,
    repeats: int = 3,
    limit_s: float = 60.0,
) -> Iterator[CopyFault]:
    """What `probe` returns, one by one: who needs only the first fault stops there."""
    everywhere = places(devices)
    pairs = [(source, destination) for source in everywhere for destination in everywhere if source != destination]
    faulty: set[Pair] = set()
    with _Prober(everywhere, transport, sizes, repeats, limit_s) as prober:
        for loaded in (False, True):
            for pair in pairs:
                if pair in faulty:
                    continue
                others = [other for other in _in_flight(pair, everywhere) if loaded and other not in faulty]
                for fault in prober.faults(pair, others):
                    faulty.add(pair)
                    yield fault


def _in_flight(pair: Pair, everywhere: Sequence[Place]) -> list[Pair]:
    """The way back, and from each device to the next."""
    ring = [*zip(everywhere, [*everywhere[1:], everywhere[0]], strict=True)]
    return [pair[::-1], *ring]


class _Prober:
    """The process that copies, or the next one where one has hung or failed."""

    def __init__(
        self,
        everywhere: Sequence[Place],
        transport: Transport | None,
        sizes: Sequence[int],
        repeats: int,
        limit_s: float,
    ) -> None:
        transports = [DeviceTransport("copy engine"), DeviceTransport("kernel")] if transport is None else [transport]
        self._task = (everywhere, transports, sizes, repeats)
        self._limit_s = limit_s
        self._stack = ExitStack()
        self._connection: Connection | None = None

    def __enter__(self) -> "_Prober":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def faults(self, pair: Pair, in_flight: Sequence[Pair]) -> Iterator[CopyFault]:
        connection = self._connection or self._start()
        connection.send((pair, in_flight))
        deadline = time.monotonic() + self._limit_s
        while (message := received(connection, deadline - time.monotonic())) is not None:
            if isinstance(message, CopyFault):
                yield message
                continue
            self._stack.close()
            self._connection = None
            if message.kind is None:
                raise ProbeError(f"the copies between devices could not be probed: {message.detail}")
            yield CopyFault(pair[0].name, pair[1].name, message.kind, 0, message.detail)
            return

    def _start(self) -> Connection:
        self._connection = self._stack.enter_context(worker(_work, *self._task))
        ready = received(self._connection, START_S)
        if ready is not None:
            raise ProbeError(f"the copies between devices could not be probed: {ready.detail}")
        return self._connection


def _work(
    everywhere: Sequence[Place],
    transports: Sequence[Transport],
    sizes: Sequence[int],
    repeats: int,
    connection: Connection,
) -> None:
    """Answer each pair with its faults and None; at first send None when the devices are ready."""
    try:
        load = Load(everywhere, num_bytes=max(sizes))
        connection.send(None)
        while True:
            pair, in_flight = connection.recv()
            check = PairCheck(pair, transports, load, in_flight)
            for fault in check.faults(sizes=sizes, repeats=repeats):
                connection.send(fault)
            connection.send(None)
    except EOFError:  # nobody asks any more
        return
    except Exception as error:
        connection.send(reason(error))
