"""The only code that decides what goes to which device and process: strategies, registered under their short names.

Importing this package makes `Trainer(strategy="dp")` and `--trainer.strategy=dp` work. `ddp` and `ddp_spawn` are
Lightning's own; `ProcessSyncBatchNorm` gives them synchronised BatchNorm on the CPU too.
"""

import atexit

from lightning.pytorch.strategies import StrategyRegistry

from lit_cifar.launch.signals import destroy_process_group_at_exit
from lit_cifar.strategies.ddp_mp import DDPLayerParallelStrategy
from lit_cifar.strategies.dp import DataParallelStrategy
from lit_cifar.strategies.fsdp2 import ShardedStrategy
from lit_cifar.strategies.mp import LayerParallelStrategy
from lit_cifar.strategies.one_device import (
    OneDeviceDDPLayerParallelStrategy,
    OneDeviceDDPStrategy,
    OneDeviceShardedStrategy,
)
from lit_cifar.strategies.pp import PipelineStrategy
from lit_cifar.strategies.sync_batchnorm import ProcessSyncBatchNorm

__all__ = [
    "DDPLayerParallelStrategy",
    "DataParallelStrategy",
    "LayerParallelStrategy",
    "OneDeviceDDPLayerParallelStrategy",
    "OneDeviceDDPStrategy",
    "OneDeviceShardedStrategy",
    "PipelineStrategy",
    "ProcessSyncBatchNorm",
    "ShardedStrategy",
]

for _strategy in (
    DataParallelStrategy,
    LayerParallelStrategy,
    DDPLayerParallelStrategy,
    PipelineStrategy,
    ShardedStrategy,
):
    _strategy.register_strategies(StrategyRegistry)

# Registered here, so that every process does it: those that Lightning starts import the package too.
atexit.register(destroy_process_group_at_exit)
