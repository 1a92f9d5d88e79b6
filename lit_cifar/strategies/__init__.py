"""The only code that decides what goes to which device and process: strategies, which register their short names.

Importing this package makes `Trainer(strategy="dp")` work. `ddp` and `ddp_spawn` are Lightning's own;
`ProcessSyncBatchNorm` gives them synchronised BatchNorm on the CPU too.
"""

from lit_cifar.launch import signals as signals  # a process leaves its groups at exit
from lit_cifar.strategies.ddp_flat import FlatDDPStrategy as FlatDDPStrategy
from lit_cifar.strategies.dp import DataParallelStrategy as DataParallelStrategy
from lit_cifar.strategies.fsdp2 import ShardedStrategy as ShardedStrategy
from lit_cifar.strategies.mp import DDPLayerParallelStrategy as DDPLayerParallelStrategy
from lit_cifar.strategies.mp import LayerParallelStrategy as LayerParallelStrategy
from lit_cifar.strategies.one_device import OneDeviceDDPLayerParallelStrategy as OneDeviceDDPLayerParallelStrategy
from lit_cifar.strategies.one_device import OneDeviceDDPStrategy as OneDeviceDDPStrategy
from lit_cifar.strategies.one_device import OneDeviceFlatDDPStrategy as OneDeviceFlatDDPStrategy
from lit_cifar.strategies.one_device import OneDevicePipelineStrategy as OneDevicePipelineStrategy
from lit_cifar.strategies.one_device import OneDeviceShardedStrategy as OneDeviceShardedStrategy
from lit_cifar.strategies.pp import PipelineStrategy as PipelineStrategy
from lit_cifar.strategies.sync_batchnorm import ProcessSyncBatchNorm as ProcessSyncBatchNorm
