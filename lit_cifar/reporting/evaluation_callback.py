"""Base of the callbacks that treat the validation and the test alike."""

from abc import ABC, abstractmethod
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.data.images import Batch

Split = Literal["val", "test"]


class EvaluationCallback(Callback, ABC):
    """Calls `_start`, `_count` for every batch, and `_finish`, in every process."""

    @abstractmethod
    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None: ...

    @abstractmethod
    def _count(self, trainer: Trainer, logits: Any, batch: Batch) -> None: ...

    @abstractmethod
    def _finish(self, trainer: Trainer, pl_module: LightningModule, split: Split) -> None: ...

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, *_: Any, **__: Any
    ) -> None:
        self._count(trainer, outputs, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "val")

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "test")
