"""The copies from one device to another, each checked by the device that receives it."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_cifar.copy_probe.copy_fault import SENTINEL, CopyFault, Kind, classify
from lit_cifar.copy_probe.transport import Transport
from lit_cifar.data.counter_rng import Purpose, keyed_bits

_LATE_S = 0.1  # after which a copy is looked at once more
_LOAD_BYTES = 16 * 2**20
_COPIES_IN_FLIGHT = 4
_WORD_BYTES = 8


@dataclass(frozen=True)
class Place:
    """A device and its name; virtual devices on the CPU differ by their names alone."""

    device: torch.device
    name: str


Pair = tuple[Place, Place]


def places(devices: Sequence[torch.device]) -> list[Place]:
    """`devices` with their names: cuda:0, cuda:1; on the CPU cpu:0, cpu:1 by their order."""
    return [
        Place(device, f"cpu:{index}" if device.type == "cpu" else str(device)) for index, device in enumerate(devices)
    ]


def pattern(num_words: int, *, number: int, device: torch.device) -> Tensor:
    """Random int64, (num_words,), a function of `number`: each device makes the same ones for itself."""
    return keyed_bits(torch.arange(num_words, device=device), seed=number, epoch=0, purpose=Purpose.COPY_PROBE)


class Load:
    """Other copies that are in flight while one is checked.

    Args:
        everywhere: All devices of the probe.
        num_bytes: Size of each copy.
    """

    def __init__(self, everywhere: Sequence[Place], *, num_bytes: int) -> None:
        words = min(num_bytes, _LOAD_BYTES) // _WORD_BYTES
        self._sources = {place: pattern(words, number=0, device=place.device) for place in everywhere}
        self._outs = {place: torch.zeros_like(source) for place, source in self._sources.items()}
        self._streams = {
            place.device: torch.cuda.Stream(place.device)  # type: ignore[no-untyped-call]
            for place in everywhere
            if place.device.type == "cuda"
        }

    def start(self, transport: Transport, pairs: Sequence[Pair]) -> None:
        """Begin copies between `pairs`."""
        for sender, receiver in pairs:
            with self._aside(sender, receiver):
                for _ in range(_COPIES_IN_FLIGHT):
                    transport.copy(
                        self._sources[sender], self._outs[receiver], sender=sender.name, receiver=receiver.name
                    )

    def _aside(self, *ends: Place) -> AbstractContextManager[object]:
        """On streams of their own, so that the copy that is checked does not wait for them."""
        stack = ExitStack()
        for end in ends:
            if end.device in self._streams:
                stack.enter_context(torch.cuda.stream(self._streams[end.device]))
        return stack


class PairCheck:
    """Copies from `source` to `destination`.

    Args:
        pair: The device that sends, and the one that receives and checks.
        transports: What copies.
        load: The other copies.
        in_flight: Between which pairs other copies go on meanwhile; none if the devices are idle.
    """

    def __init__(self, pair: Pair, transports: Sequence[Transport], load: Load, in_flight: Sequence[Pair]) -> None:
        self.source, self.destination = pair
        self.transports = transports
        self.load, self.in_flight = load, in_flight
        self._number = 0

    def faults(self, *, sizes: Sequence[int], repeats: int) -> Iterator[CopyFault]:
        """One for each size and kind of fault."""
        for num_bytes in sizes:
            found = [*self._of_size(num_bytes, repeats)]
            counts = Counter(kind for kind, _ in found)
            for kind, detail in reversed(dict(reversed(found)).items()):  # what was seen first, of each kind
                of_all = f"{counts[kind]} of {repeats * len(self.transports)} copies"
                state = "under load" if self.in_flight else "idle"
                yield CopyFault(
                    self.source.name, self.destination.name, kind, num_bytes, f"{detail} ({of_all}, {state})"
                )

    def _of_size(self, num_bytes: int, repeats: int) -> Iterator[tuple[Kind, str]]:
        out = torch.empty(num_bytes // _WORD_BYTES, dtype=torch.int64, device=self.destination.device)
        for repeat in range(repeats):
            for transport in self.transports:
                fault = self._copy(transport, out, first=repeat == 0)
                if fault is not None:
                    yield fault[0], f"{fault[1]}, by {transport.name}"

    def _copy(self, transport: Transport, out: Tensor, *, first: bool) -> tuple[Kind, str] | None:
        """Send a pattern of its own over the sentinel that lies in `out`, and compare."""
        self._number += 1
        source = pattern(len(out), number=self._number, device=self.source.device)
        sent = pattern(len(out), number=self._number, device=out.device)
        out.fill_(SENTINEL)
        self.load.start(transport, self.in_flight)
        transport.copy(source, out, sender=self.source.name, receiver=self.destination.name)
        # As in a training, only the receiver's stream waits for the copy, not the host.
        right = torch.equal(out, sent)
        arrived = out if right else out.cpu()
        transport.wait(source, out)
        if right:
            return None
        time.sleep(_LATE_S)
        if torch.equal(out, sent):
            return "delayed", f"it was not there when the copy was complete, but {_LATE_S:g} s later"
        numbers = [0] if first else [0, self._number - 1]
        earlier = [pattern(len(out), number=number, device=arrived.device) for number in numbers]
        return classify(arrived, sent.cpu(), earlier=earlier)
