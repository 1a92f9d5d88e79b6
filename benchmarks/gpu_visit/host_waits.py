"""A callback that notes where the host waits for the GPU in some steps of a run.

On a GPU these are the places at which torch warns under `torch.cuda.set_sync_debug_mode("warn")`: with "error" a run
would end at the first, and the others would stay unknown. Without a GPU they are the operations whose result the host
must look at before it can go on.
"""

import json
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_cifar.checkpoint.step_boundary import StepBoundary

_WAITING = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "equal", "unique", "_unique2", "is_nonzero")
_OUTSIDE = ("/torch/", "/warnings.py", "/contextlib.py", "gpu_visit/host_waits.py")
_NUM_FRAMES = 3


class HostWaits(L.Callback):
    """Writes to `path`, as JSON, how often the host has waited, by place in the code.

    From the beginning of step `first` to the end of step `last`, which includes fetching the batches between them. No
    agreement between processes falls into these steps: there a GPU is waited for, on purpose, once a second.

    Args:
        path: File.
        first: Step with which it begins, after those in which memory is allocated and kernels are chosen.
        last: Step with which it ends.
        plant: Wait once in these steps, to see that it is noted.
    """

    def __init__(self, path: str, *, first: int = 4, last: int = 12, plant: bool = False) -> None:
        self.path = Path(path)
        self.first = first
        self.last = last
        self.plant = plant
        self._places: Counter[str] = Counter()
        self._watch: AbstractContextManager[None] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Put off the agreements."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StepBoundary):
                callback.agree_every_s = 1e6

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin."""
        if trainer.global_step == self.first and self._watch is None:
            on_gpu = pl_module.device.type == "cuda"
            self._watch = _warned_of(self._places) if on_gpu else _Dispatched(self._places)
            self._watch.__enter__()
            if self.plant:
                outcome = batch.images.sum().item()
                assert outcome == outcome, "the images are numbers"

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End, and write."""
        if trainer.global_step > self.last and self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
            if trainer.is_global_zero:
                content = {"steps": self.last - self.first + 1, "places": self._places}
                self.path.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def _warned_of(places: Counter[str]) -> Iterator[None]:
    """Notes torch's warnings about operations for which the host waits."""

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing" in str(message):
            places[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class _Dispatched(TorchDispatchMode):
    """Notes operations whose result depends on the values of tensors, or leaves them."""

    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self._places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _WAITING:
            self._places[f"{func.overloadpacket.__name__}: {_place()}"] += 1
        return func(*args, **kwargs or {})


def _place() -> str:
    """Where in the code that is, innermost call first."""
    frames = [frame for frame in reversed(traceback.extract_stack()) if not any(p in frame.filename for p in _OUTSIDE)]
    return " < ".join(f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}" for f in frames[:_NUM_FRAMES])
