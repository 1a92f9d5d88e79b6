"""Less work between two training steps: hooks that do nothing are not called, and nothing is profiled unasked.

In each step Lightning calls six hooks of every callback, each in a context of its profiler, though most callbacks have
one of them or none. On a CPU that takes longer than what the callbacks do.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler

_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
_NOTHING: AbstractContextManager[Any] = nullcontext()


class NoProfiler(PassThroughProfiler):
    """Lightning's default, which measures nothing, without a generator for each of its contexts."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]  # no generator
        return _NOTHING


def leave_out_empty_hooks(callbacks: Iterable[Callback], module: LightningModule) -> None:
    """Replace the hooks of a training step that are Lightning's own, and empty, by None, which it does not call."""
    for owner, base in [*((callback, Callback) for callback in callbacks), (module, LightningModule)]:
        for name in _STEP_HOOKS:
            if getattr(getattr(owner, name), "__func__", None) is getattr(base, name):
                setattr(owner, name, None)
