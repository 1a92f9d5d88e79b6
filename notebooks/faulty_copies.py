"""Loses copies between the virtual devices of `dp` on a CPU, to see what becomes of a training."""

from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lit_cifar.strategies import dp

_ALIGNMENT_BYTES = 64


class FaultyCopies(L.Callback):
    """Lets parameters, images, logits and gradients pass between two virtual devices, and spoils some of the copies.

    A copy that is lost leaves at its destination what lay there before: on a GPU that is some earlier tensor, as torch
    uses freed memory again. So each virtual device has a memory that is used in turn and is zero in the beginning.

    Args:
        kind: "lost": nothing arrives. "torn": the first half arrives. "flipped": one bit is flipped.
        every: Of how many copies one is spoilt.
        memory_bytes: Of each virtual device. Less than the parameters need makes a small network meet old tensors in
            the first steps, as a large one does on a GPU.
    """

    def __init__(
        self, kind: Literal["lost", "torn", "flipped"] = "lost", *, every: int = 1, memory_bytes: int = 2**26
    ) -> None:
        self.kind, self.every = kind, every
        self.memories = [_Memory(memory_bytes) for _ in range(2)]
        self.num_copies = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        dp.functional_call = self.run_replica  # type: ignore[assignment, attr-defined]

    def run_replica(self, network: nn.Module, buffers: dict[str, Tensor], images: tuple[Tensor]) -> Tensor:
        state = {**dict(network.named_parameters()), **buffers}
        arrived = {name: self.send(tensor, 0, 1) for name, tensor in state.items()}
        return self.send(functional_call(network, arrived, (self.send(images[0], 0, 1),)), 1, 0)

    def send(self, tensor: Tensor, sender: int, receiver: int) -> Tensor:
        """`tensor` as it arrives; its gradient is sent the other way."""
        arrived: Tensor = _Sent.apply(tensor, self, sender, receiver)
        return arrived

    def copy(self, tensor: Tensor, sender: int, receiver: int) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()  # numbers that only count
        source, out = (self.memories[device].take(tensor) for device in (sender, receiver))
        source.copy_(tensor)
        self.num_copies += 1
        if self.num_copies % self.every:
            out.copy_(source)
        elif self.kind == "torn":
            out.view(-1)[: out.numel() // 2] = source.view(-1)[: out.numel() // 2]
        elif self.kind == "flipped":
            out.copy_(source).view(-1).view(torch.uint8)[-1] ^= 1 << 4  # an exponent bit of float32
        return out.clone()


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
    def forward(ctx: Any, tensor: Tensor, devices: FaultyCopies, sender: int, receiver: int) -> Tensor:
        ctx.way_back = devices, receiver, sender
        return devices.copy(tensor.detach(), sender, receiver)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        devices, sender, receiver = ctx.way_back
        return devices.copy(gradients[0], sender, receiver), None, None, None
