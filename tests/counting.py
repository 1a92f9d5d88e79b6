"""Which operators the host starts, for which of them it would wait for a GPU, and how much they make."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = ("_local_scalar_dense", "allclose", "bincount", "equal", "nonzero", "_unique2")


class Operators(TorchDispatchMode):
    """Counts the operators that are started inside, by name.

    Attributes:
        counts: How often each was.
        num_bytes: Sum of the sizes of their results.
        largest: Size of the largest, in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_bytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        made = func(*args, **(kwargs or {}))
        size = made.nbytes if isinstance(made, Tensor) else 0
        self.num_bytes, self.largest = self.num_bytes + size, max(self.largest, size)
        return made

    @property
    def waits(self) -> Counter[str]:
        """Those whose result decides what the host does next: a number that is read, or a shape."""
        return Counter({name: self.counts[name] for name in WAITING if name in self.counts})
