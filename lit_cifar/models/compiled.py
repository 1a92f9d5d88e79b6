"""torch.compile around a network or a part of one, whose names, weights and checkpoints stay as they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import config

BACKEND = "inductor"

# torch counts compilations by code, which the stages of a network share, and so do its blocks; beyond its limit, 8 of
# them, it continues uncompiled. ResNet152 has 50 blocks, each compiled for training and for evaluation.
_MAX_COMPILATIONS = 128


class Compiled:
    """Runs a module compiled for the largest batch so far, and smaller batches as they are.

    A ragged last batch would be another compilation, minutes in the middle of an epoch, after which torch would take
    kernels for any size, slower ones, for all batches. Training and evaluation are compiled apart.

    `call` is compiled in place of the module with its hooks. A `Compiled` is no `nn.Module`: who has it gets no child.

    With `cuda_graphs` a whole forward or backward pass is started at once, as a CUDA graph. The output and the
    gradients then lie in memory that the next training batch overwrites: nothing may refer to them by then.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any] | None = None, *, cuda_graphs: bool = False) -> None:
        config.recompile_limit = max(config.recompile_limit, _MAX_COMPILATIONS)
        self._plain: Callable[..., Any] = module if call is None else call
        mode = "reduce-overhead" if cuda_graphs else None
        self._compiled: Callable[..., Any] = torch.compile(self._plain, backend=BACKEND, dynamic=False, mode=mode)
        self._cuda_graphs = cuda_graphs
        self._largest: dict[bool, int] = {}

    def for_batch(self, num_samples: int) -> Any:
        """Return the callable for a batch of `num_samples`: the compiled module, or the module itself."""
        largest = self._largest.setdefault(torch.is_grad_enabled(), num_samples)
        if num_samples < largest:
            return self._plain
        self._largest[torch.is_grad_enabled()] = num_samples
        return self._compiled

    def __call__(self, images: Tensor) -> Any:
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self.for_batch(len(images))(images)
