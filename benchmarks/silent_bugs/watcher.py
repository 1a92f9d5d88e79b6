"""Writes down the losses and the reports of a project with Lightning."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl


class Watcher(pl.Callback):
    """Beside `Replay`, if there is one."""

    def __init__(self, replay: Any, report_loss: Callable[[Any], None], write_report: Callable[..., None]) -> None:
        self.replay, self.report_loss, self.write_report = replay, report_loss, write_report

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if loss is not None and trainer.is_global_zero:
            self.report_loss(loss)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.replay is not None and trainer.is_global_zero:
            for report in self.replay.reports:
                self.write_report(report.as_json(), "\n".join(report.lines()))
