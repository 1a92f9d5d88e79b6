"""Virtual devices on the CPU that really copy what passes between them, through a transport that may be faulty."""

from typing import Any

import torch
from torch import Tensor

from lit_cifar.copy_probe.transport import Transport

_ALIGNMENT_BYTES = 64


class VirtualDevices:
    """Sends tensors between virtual devices, and their gradients back.

    A copy that does not arrive leaves at its destination what lay there before. On a GPU that is some earlier tensor,
    as torch uses freed memory again. So each virtual device has a memory that is used in turn: what is sent from there
    or arrives there overwrites what has lain there the longest. It is zero in the beginning.

    Args:
        transport: What copies.
        memory_bytes: Size of the memory of each device.
    """

    def __init__(self, transport: Transport, *, memory_bytes: int = 2**26) -> None:
        self.transport = transport
        self.memory_bytes = memory_bytes
        self._memories: dict[int, _Memory] = {}

    def send(self, tensor: Tensor, sender: int, receiver: int) -> Tensor:
        """`tensor` as it arrives at the device `receiver`; its gradient is sent the other way."""
        arrived: Tensor = _Sent.apply(tensor, self, sender, receiver)
        return arrived

    def copy(self, tensor: Tensor, sender: int, receiver: int) -> Tensor:
        """The same without gradient."""
        if not tensor.is_floating_point():
            return tensor.clone()  # numbers that only count
        source = self._take(sender, tensor)
        source.copy_(tensor)
        out = self._take(receiver, tensor)
        self.transport.copy(source, out, sender=f"cpu:{sender}", receiver=f"cpu:{receiver}")
        return out.clone()

    def _take(self, device: int, like: Tensor) -> Tensor:
        if device not in self._memories:
            self._memories[device] = _Memory(self.memory_bytes)
        return self._memories[device].take(like)


class _Memory:
    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self._next = 0

    def take(self, like: Tensor) -> Tensor:
        """The next part, with shape and type of `like` and its old content."""
        num_bytes = like.numel() * like.element_size()
        if self._next + num_bytes > len(self._bytes):
            self._next = 0
        part = self._bytes[self._next : self._next + num_bytes]
        self._next += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return part.view(like.dtype).view(like.shape)


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, devices: VirtualDevices, sender: int, receiver: int) -> Tensor:
        ctx.way_back = devices, receiver, sender
        return devices.copy(tensor.detach(), sender, receiver)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        devices, sender, receiver = ctx.way_back
        return devices.copy(gradients[0], sender, receiver), None, None, None
