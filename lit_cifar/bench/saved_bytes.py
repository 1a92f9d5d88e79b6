"""What autograd keeps for backward, counted while a training step runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lit_cifar.strategies.mesh import local_part


class SavedForBackward:
    """Counts bytes that are kept for backward, from `begin` to `end`. Parameters and buffers do not count.

    Tensors that share a storage count once, and a storage counts until backward has used the last of them.

    Attributes:
        peak: The most bytes that were kept at any time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.peak = 0
        self._module = module
        self._now = 0
        self._users: dict[int, int] = {}  # saved tensors of each storage
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    @torch.no_grad()
    def begin(self) -> None:
        """Count from here on, in this thread."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        self._lasting = {_address(local_part(tensor)) for tensor in tensors}
        self._hooks.__enter__()

    def end(self) -> None:
        """Stop counting."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        own = local_part(tensor.detach())
        address = _address(own)
        if address in self._lasting or address in self._gathered():
            return tensor
        if address not in self._users:
            self._users[address] = 0
            self._now += own.untyped_storage().nbytes()
            self.peak = max(self.peak, self._now)
        self._users[address] += 1
        return _Kept(tensor, lambda: self._release(address, own.untyped_storage().nbytes()))

    def _release(self, address: int, num_bytes: int) -> None:
        self._users[address] -= 1
        if self._users[address] == 0:
            del self._users[address]
            self._now -= num_bytes

    def _gathered(self) -> set[int]:
        """Where the parameters are that FSDP2 has gathered, for as long as it keeps them."""
        return {_address(parameter) for parameter in self._module.parameters() if not hasattr(parameter, "to_local")}


class _Kept:
    """A saved tensor that tells when autograd no longer needs it."""

    def __init__(self, tensor: Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        self._release = release

    def __del__(self) -> None:
        self._release()


def _unpack(kept: Any) -> Tensor:
    tensor: Tensor = kept.tensor if isinstance(kept, _Kept) else kept
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
