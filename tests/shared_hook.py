"""Callbacks that say what went through shared memory; imported by name on the command line."""

from pathlib import Path
from typing import Any

import lightning as L

from lit_cifar.strategies import shared_memory


class ReportHook(L.Callback):
    """Writes for each rank: number of buckets, whether they are shared, whether gradients are views of them."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._hooks: list[Any] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        make = shared_memory.SharedAverage.__init__

        def noted(average: Any, *args: Any) -> None:
            make(average, *args)
            self._hooks.append(average)

        shared_memory.SharedAverage.__init__ = noted

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        [average] = self._hooks
        gradient = next(iter(pl_module.parameters())).grad
        inside = [
            b for b in average._buckets.values() if b.parts[trainer.global_rank].data_ptr() <= gradient.data_ptr()
        ]
        words = f"{len(average._buckets)} {gradient.untyped_storage().is_shared()} {bool(inside)}"
        (self.folder / f"hook{trainer.global_rank}").write_text(words)


class ReportSlots(L.Callback):
    """Writes for each rank how many messages of FSDP2 went through shared memory."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._count = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        exchange = shared_memory.SharedSlots.exchange

        def noted(slots: Any, message: Any) -> Any:
            found = exchange(slots, message)
            self._count += found is not None
            return found

        shared_memory.SharedSlots.exchange = noted  # type: ignore[method-assign]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (self.folder / f"slots{trainer.global_rank}").write_text(str(self._count))
