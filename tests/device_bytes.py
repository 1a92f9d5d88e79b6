"""How many bytes of tensors are on a device, counted on a machine that has none.

The device is `cpu:0`, which is the host's memory to torch. A storage counts as there if a tensor was made there or
moved there by name, or computed from such a tensor, until nobody refers to it.
"""

from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu", 0)


class DeviceBytes(TorchDispatchMode):
    """While it is entered, the bytes on `DEVICE`: `held`, and the `peak` of it."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._crossing = _Crossing(self)

    def __enter__(self) -> Any:
        self._crossing.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._crossing.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:  # with these DTensor finds out about shapes
            return func(*args, **(kwargs or {}))
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # of a DTensor: what its parts are asked for comes here next
        output = func(*args, **(kwargs or {}))
        if any(leaf == DEVICE or is_there(leaf) for leaf in tree_leaves((args, kwargs))):
            for tensor in tree_leaves(output):
                self.put(tensor)
        return output

    def put(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or is_there(tensor):
            return
        storage = tensor.untyped_storage()
        storage.is_there = True  # type: ignore[attr-defined]
        self._add(storage.nbytes())
        finalize(storage, self._add, -storage.nbytes())

    def _add(self, num_bytes: int) -> None:
        self.held += num_bytes
        self.peak = max(self.peak, self.held)


class _Crossing(TorchFunctionMode):
    """Makes what crosses to the device or back a copy."""

    def __init__(self, counted: DeviceBytes) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (Tensor.to, Tensor.cpu) or type(args[0]) not in (Tensor, torch.nn.Parameter):
            return output
        named = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.device | str)]
        crosses_back = is_there(args[0]) and (func is Tensor.cpu or torch.device("cpu") in map(torch.device, named))
        if (DEVICE in named and not is_there(args[0])) or crosses_back:
            with torch._C.DisableTorchFunctionSubclass(), torch.utils._python_dispatch._disable_current_modes():
                output = torch.empty_like(output).copy_(output) if output.data_ptr() == args[0].data_ptr() else output
            if not crosses_back:
                self._counted.put(output)
        return output


def is_there(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return False
    try:
        return hasattr(leaf.untyped_storage(), "is_there")
    except RuntimeError:  # it has none
        return False
