"""Transports that lose, tear or change what they copy, so that the probe and a training can be tried on a CPU."""

import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import lightning as L
import torch
from torch import Tensor

from lit_cifar.copy_probe.transport import DeviceTransport, Transport
from lit_cifar.copy_probe.virtual_devices import VirtualDevices
from lit_cifar.errors import ConfigError

Fault = Literal["lost", "stale", "torn", "delayed", "flipped", "hung"]


class FaultyTransport:
    """Copies between tensors on the CPU, with a fault.

    Args:
        kind: "lost": nothing is copied. "stale": what the copy before this one, of the same shape, sent is copied.
            "torn": the first half is copied. "delayed": the copy is complete only when the caller waits for it.
            "flipped": one bit is flipped. "hung": the copy never ends.
        pair: Names of the sender and the receiver whose copies are affected; None for all.
        every: Of how many copies one is affected.

    Attributes:
        name: As of a `Transport`.
        num_copies: Copies so far.
    """

    def __init__(self, kind: Fault, pair: tuple[str, str] | None = None, every: int = 1) -> None:
        if kind not in get_args(Fault):
            raise ConfigError(f"kind={kind} is no fault of a copy", remedy=f"use one of {', '.join(get_args(Fault))}")
        self.name = f"a transport with the fault {kind!r}"
        self.kind: Fault = kind
        self.pair = pair
        self.every = every
        self.num_copies = 0
        self._earlier: dict[tuple[str, str, torch.Size], Tensor] = {}
        self._late: list[tuple[Tensor, Tensor]] = []

    def copy(self, source: Tensor, out: Tensor, *, sender: str, receiver: str) -> None:
        """Copy `source` into `out`, or do what the fault does."""
        key = (sender, receiver, source.shape)
        affected = self.pair in (None, (sender, receiver))
        self.num_copies += affected
        if affected and self.num_copies % self.every == 0:
            self._faults[self.kind](source, out, self._earlier.get(key))
        else:
            out.copy_(source)
        if self.kind == "stale":
            self._earlier[key] = source.clone()

    def wait(self, *tensors: Tensor) -> None:
        """Complete the copies that are delayed."""
        for source, out in self._late:
            out.copy_(source)
        self._late.clear()

    def __reduce__(self) -> tuple[object, ...]:
        """Without what has been copied so far, which other processes do not need."""
        return FaultyTransport, (self.kind, self.pair, self.every)

    @property
    def _faults(self) -> dict[str, Callable[[Tensor, Tensor, Tensor | None], object]]:
        return {
            "lost": lambda source, out, earlier: None,
            "stale": lambda source, out, earlier: None if earlier is None else out.copy_(earlier),
            "torn": lambda source, out, earlier: _first_half(out).copy_(_first_half(source)),
            "delayed": lambda source, out, earlier: self._late.append((source.clone(), out)),
            "flipped": lambda source, out, earlier: _flip(out.copy_(source)),
            "hung": lambda source, out, earlier: _never_end(),
        }


def _first_half(tensor: Tensor) -> Tensor:
    return tensor.view(-1)[: tensor.numel() // 2]


def _flip(tensor: Tensor) -> None:
    """The lowest bit of the last byte's upper half, an exponent bit of most floating point types."""
    tensor.view(-1).view(torch.uint8)[-1] ^= 1 << 4


def _never_end() -> None:
    while True:
        time.sleep(60.0)


class FaultyCopies(L.Callback):
    """Spoils the copies between the virtual devices of `dp` and `mp` on the CPU, to see what becomes of a training.

    A copy that is lost leaves what was in the memory of its destination, see `VirtualDevices`.

    Args:
        kind: What happens to a copy, see `FaultyTransport`; "none" lets all arrive.
        every: Of how many copies one is affected.
        memory_bytes: Of each virtual device. Less than the parameters need makes a small network meet old tensors in
            the first steps, as a large one does on a GPU.
    """

    def __init__(
        self,
        kind: Literal["lost", "stale", "torn", "flipped", "none"] = "lost",
        *,
        every: int = 1,
        memory_bytes: int = 2**26,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.transport: Transport = DeviceTransport() if kind == "none" else FaultyTransport(kind, every=every)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let the strategy copy through the transport."""
        strategy: Any = trainer.strategy
        if not getattr(strategy, "copying_devices", None) or strategy.root_device.type != "cpu":
            raise ConfigError(
                "FaultyCopies spoils copies between virtual devices of one process, and this run has none",
                remedy="use --trainer.accelerator=cpu --trainer.devices=2 with --trainer.strategy=dp or mp",
            )
        strategy.virtual_devices = VirtualDevices(self.transport, memory_bytes=self.memory_bytes)
