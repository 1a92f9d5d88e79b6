"""Transports and collectives that go wrong, for processes that import them by name."""

import os
import time

import torch.distributed as dist
from torch import Tensor

from lit_cifar.copy_probe import DeviceTransport
from lit_cifar.copy_probe.collectives import Collectives


class LosesUnderLoad(DeviceTransport):
    """Copies nothing while an earlier copy has not been waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = 0

    def copy(self, source: Tensor, out: Tensor, *, sender: str = "", receiver: str = "") -> None:
        """Copy if this is the only one."""
        self.in_flight += 1
        if self.in_flight == 1:
            super().copy(source, out)

    def wait(self, *tensors: Tensor) -> None:
        """All copies are complete."""
        self.in_flight = 0


class DiesAt(DeviceTransport):
    """Ends the process at a copy from `sender`."""

    def __init__(self, sender: str) -> None:
        super().__init__()
        self.sender = sender

    def copy(self, source: Tensor, out: Tensor, *, sender: str = "", receiver: str = "") -> None:
        """Copy, or end the process."""
        if sender == self.sender:
            os._exit(3)
        super().copy(source, out)


class Raises(DeviceTransport):
    """Raises `error` at a copy from `sender`."""

    def __init__(self, sender: str, error: Exception | None = None) -> None:
        super().__init__()
        self.sender, self.error = sender, error or RuntimeError("no link")

    def copy(self, source: Tensor, out: Tensor, *, sender: str = "", receiver: str = "") -> None:
        """Copy, or raise the error."""
        if sender == self.sender:
            raise self.error
        super().copy(source, out)


class SpoiledCollectives(Collectives):
    """The second all-reduce of `rank` does nothing, or hangs."""

    def __init__(self, *, rank: int, hangs: bool) -> None:
        self.rank, self.hangs, self.num_done = rank, hangs, 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum, or do it wrong."""
        self.num_done += 1
        if self.num_done == 2 and dist.get_rank() == self.rank and self.hangs:
            time.sleep(600)
        own = tensor.clone()
        super().all_reduce(tensor)
        if self.num_done == 2 and dist.get_rank() == self.rank:
            tensor.copy_(own)
