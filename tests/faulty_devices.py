"""Devices that compute wrongly, are slow, or lose what they send; and the doctor's probe with one of each."""

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lit_cifar.tools.doctor.arithmetic import Operation
from lit_cifar.tools.doctor.measurement import Device, Measurement, main, measure

CPU = torch.device("cpu")
SMALL = (1024, 65536)
PAUSE_S = 0.05
"""So long that the ratio to a matrix product of milliseconds is beyond doubt."""


class Flipping(Device):
    """One bit of one value is flipped in the convolution."""

    def run(self, operation: Operation) -> Tensor:
        result = super().run(operation)
        if operation.name == "convolution":
            result.view(torch.int32).view(-1)[5] ^= 1  # the lowest bit of the fraction
        return result


class Slow(Device):
    def run(self, operation: Operation) -> Tensor:
        time.sleep(PAUSE_S)
        return super().run(operation)


class Sending(Device):
    """What an all-reduce leaves on this rank is spoilt by `spoil(values, own, before)`."""

    def __init__(self, inner: Device, spoil: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        super().__init__(inner.device)
        self.inner, self.spoil = inner, spoil
        self.before = torch.zeros(0)

    def all_reduce(self, values: Tensor) -> None:
        own = values.clone()
        self.inner.all_reduce(values)
        right = values.clone()
        if len(self.before) == len(values):
            self.spoil(values, own, self.before)
        self.before = right


def lose(values: Tensor, own: Tensor, before: Tensor) -> None:
    values.copy_(own)


def keep(values: Tensor, own: Tensor, before: Tensor) -> None:
    values.copy_(before)


def tear(values: Tensor, own: Tensor, before: Tensor) -> None:
    values[len(values) // 2 :] = before[len(values) // 2 :]


def garble(values: Tensor, own: Tensor, before: Tensor) -> None:
    values[3] += 0.5


class World:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Tensor] = [torch.zeros(0)] * size

    def measure(self, make: Callable[[int, Device], Device] = lambda rank, device: device) -> list[Measurement]:
        """What the ranks measure; `make` puts a device with a fault in place of the one that works."""
        found: dict[int, Measurement] = {}

        def run(rank: int) -> None:
            device = make(rank, Joined(self, rank))
            found[rank] = measure(
                device, rank=rank, world_size=self.size, meet=self.barrier.wait, report=lambda _: None, sizes=SMALL
            )

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(self.size)]


class Joined(Device):
    """A device whose all-reduce is the sum over the threads of a `World`."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(CPU)
        self.world, self.rank = world, rank

    def all_reduce(self, values: Tensor) -> None:
        self.world.slots[self.rank] = values.clone()
        self.world.barrier.wait()
        values.copy_(torch.stack(self.world.slots).sum(0))
        self.world.barrier.wait()


def of_rank(device: torch.device, rank: int) -> Device:
    """Rank 0 is right, rank 1 flips a bit and is slow, rank 2 loses what it receives."""
    if rank == 1:
        return type("Both", (Slow, Flipping), {})(device)  # type: ignore[no-any-return]
    return Sending(Device(device), lose) if rank == 2 else Device(device)


if __name__ == "__main__":
    main(of_rank)
