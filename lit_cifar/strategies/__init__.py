"""The only code that knows devices and process groups: one file per strategy, registered under its short name.

Importing this package makes `Trainer(strategy="dp")` and `--trainer.strategy=dp` work. `ddp` and `ddp_spawn` are
Lightning's own; `ProcessSyncBatchNorm` gives them synchronised BatchNorm on the CPU too.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lit_cifar.strategies.dp import DataParallelStrategy
from lit_cifar.strategies.sync_batchnorm import ProcessSyncBatchNorm

__all__ = ["DataParallelStrategy", "ProcessSyncBatchNorm"]

DataParallelStrategy.register_strategies(StrategyRegistry)
