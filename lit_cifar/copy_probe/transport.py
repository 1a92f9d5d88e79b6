"""How a tensor gets from one device to another: torch's own copies, and what faulty ones have in common with them."""

from typing import Literal, Protocol

import torch
from torch import Tensor

Way = Literal["copy engine", "kernel"]


class Transport(Protocol):
    """Copies tensors between devices.

    Attributes:
        name: By what it copies, for reports.
    """

    name: str

    def copy(self, source: Tensor, out: Tensor, *, sender: str, receiver: str) -> None:
        """Copy `source` into `out`, of the same shape and type; it may return before the content has arrived.

        Args:
            source: On the device `sender`.
            out: On the device `receiver`.
            sender: Name of a device. Virtual devices on the CPU differ by this name alone.
            receiver: Name of a device.
        """

    def wait(self, *tensors: Tensor) -> None:
        """Return when all copies from and to the devices of `tensors` are complete."""


class DeviceTransport:
    """torch's copies between devices.

    Between CUDA devices torch copies contiguous tensors by `cudaMemcpyAsync` or `cudaMemcpyPeerAsync`: a copy engine
    does that. If the order of elements changes on the way, and the sender may access the receiver's memory, torch runs
    a kernel on the sender that writes there (`copy_device_to_device` in aten/src/ATen/native/cuda/Copy.cu). Without
    such access the engine copies again. No operator of torch lets a kernel read the memory of another device; the
    collectives of NCCL do.

    Args:
        by: What is to copy.
    """

    def __init__(self, by: Way = "copy engine") -> None:
        self.name: str = by

    def copy(self, source: Tensor, out: Tensor, *, sender: str = "", receiver: str = "") -> None:
        """Copy `source` into `out`; see `Transport`. A kernel needs an even number of elements."""
        if self.name == "kernel":
            columns = source.view(-1, 2).t().contiguous()  # on the sender, so that the order has to change on the way
            out.view(-1, 2).copy_(columns.t(), non_blocking=True)
        else:
            out.copy_(source, non_blocking=True)

    def wait(self, *tensors: Tensor) -> None:
        """Wait for all work on the devices of `tensors`."""
        for device in {tensor.device for tensor in tensors}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
