"""The only code that decides what goes to which device and process: strategies, which register their short names.

Importing this package makes `Trainer(strategy="dp")` work. The command line does it if one of them may be asked for.
`ddp` and `ddp_spawn` are Lightning's own; `ProcessSyncBatchNorm` gives them synchronised BatchNorm on the CPU too.
"""

from lit_cifar.launch import signals as signals  # a process leaves its groups at exit
from lit_cifar.strategies.ddp_flat import FlatDDPStrategy
from lit_cifar.strategies.dp import DataParallelStrategy
from lit_cifar.strategies.fsdp2 import ShardedStrategy
from lit_cifar.strategies.mp import DDPLayerParallelStrategy, LayerParallelStrategy
from lit_cifar.strategies.one_device import (
    OneDeviceDDPLayerParallelStrategy,
    OneDeviceDDPStrategy,
    OneDeviceFlatDDPStrategy,
    OneDevicePipelineStrategy,
    OneDeviceShardedStrategy,
)
from lit_cifar.strategies.pp import PipelineStrategy
from lit_cifar.strategies.sync_batchnorm import ProcessSyncBatchNorm

__all__ = [
    "DDPLayerParallelStrategy",
    "DataParallelStrategy",
    "FlatDDPStrategy",
    "LayerParallelStrategy",
    "OneDeviceDDPLayerParallelStrategy",
    "OneDeviceDDPStrategy",
    "OneDeviceFlatDDPStrategy",
    "OneDevicePipelineStrategy",
    "OneDeviceShardedStrategy",
    "PipelineStrategy",
    "ProcessSyncBatchNorm",
    "ShardedStrategy",
]
