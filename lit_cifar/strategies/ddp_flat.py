"""`ddp_flat`, which is `ddp` without DistributedDataParallel: one all-reduce after backward averages all gradients.

DistributedDataParallel sends gradients by hooks while backward runs, and these cannot be part of a CUDA graph
(https://github.com/pytorch/pytorch/issues/128218). Here forward and backward of a process are those of one GPU.
The price is that no message is sent before backward has ended.
"""

from typing import Any

from torch import nn

from lit_cifar.mode import ForwardFn
from lit_cifar.models.compiled import Compiled
from lit_cifar.strategies.base import compiles
from lit_cifar.strategies.mesh import AveragingStrategy


class FlatDDPStrategy(AveragingStrategy):
    """A replica of the network in each process. `--model.compile=cuda_graphs` takes it in place of `ddp`."""

    strategy_name = "ddp_flat"

    def make_forward_fn(self, network: nn.Module) -> ForwardFn:
        module: Any = self.lightning_module
        return Compiled(network, cuda_graphs=module.cuda_graphs) if compiles(module) else network.__call__
