"""`--virtual_replicas=V`: training ends with the same bits on every number of processes that divides V.

On two devices a batch is summed in another order than on one, and the kernels get other shapes. So the results round
differently. Here a global batch is cut into V parts on any number of processes. Each part passes forward and
backward by itself, and is normalised by itself (ghost batch normalisation, Hoffer et al., 2017). The gradients of the
parts are summed in the order of one fixed binary tree, whose subtrees the processes hold. The
running statistics of BatchNorm are treated alike: each part updates a copy of those before the step, and the mean of
the copies is kept.

The idea of parts that do not depend on the devices is that of Or, Zhang and Freedman, "VirtualFlow", MLSys 2022; equal
bits are the aim of Li et al., "EasyScale", SC 2023.
"""

from collections.abc import Callable
from functools import partial

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lit_cifar.batch_split import BatchSplit
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.strategies.clipping import clip_in_order
from lit_cifar.strategies.custom_forward import CustomForwardStrategy
from lit_cifar.strategies.loss_scaling import loss_scale
from lit_cifar.strategies.parts import Parts
from lit_cifar.strategies.pp import PipelineStrategy
from lit_cifar.strategies.random_streams import begin_part
from lit_cifar.strategies.same_bits import check_same_bits
from lit_cifar.strategies.sharded import ShardedStrategy


class VirtualReplicas(Callback):
    """Cuts batches into parts, and gives the optimizer the mean of the parts' gradients.

    Args:
        num_parts: V, a power of two that the global batch can be divided by.
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self._parts = Parts(num_parts)
        self._are_microbatches = False

    # What the module calls in place of its own pass over a batch.

    def train(self, module: L.LightningModule, batch: Batch, loss_of: Callable[[Batch], Tensor]) -> Tensor:
        """Forward and backward of all parts but the last, whose loss is returned for the backward of Lightning."""
        *first, last = self._parts.cut(batch)
        if self._are_microbatches:  # the pipeline has been through forward and backward
            for part in first:
                loss_of(part)
            return loss_of(last)
        self._parts.begin(module.network.buffers())  # type: ignore[union-attr]  # it has been checked
        strategy = module.trainer.strategy
        scale = loss_scale(strategy.precision_plugin, strategy.root_device)
        *places, last_place = self._parts.places
        for place, part in zip(places, first, strict=True):
            begin_part(place)
            with self._parts.own_statistics():
                loss = loss_of(part) * scale
            with torch.autocast(loss.device.type, enabled=False):
                loss.backward()  # type: ignore[no-untyped-call]
            torch.clear_autocast_cache()  # weights that were cast belong to the graph that is gone
        begin_part(last_place)
        with self._parts.own_statistics():
            return loss_of(last)

    def evaluate(self, images: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits (n, num_classes) of the images (n, ...) of this process, whose parts go forward one by one."""
        count = self._parts.count
        parts = [images[place::count] for place in range(count)]
        if self._are_microbatches:  # the pipeline cuts their row where one ends
            logits = [*torch.split(forward(torch.cat(parts)), [len(part) for part in parts])]
        else:
            logits = [forward(part) for part in parts]
        whole = logits[0].new_empty(len(images), *logits[0].shape[1:])
        for place, part in enumerate(logits):
            whole[place::count] = part
        return whole

    def check(self, trainer: L.Trainer, data: CIFAR10DataModule) -> None:
        """Refuse what would change the bits, before any process is started: a `ConfigError`."""
        check_same_bits(self.num_parts, trainer, data)
        self._divide(trainer.strategy)

    def _divide(self, strategy: Strategy, *, group: dist.ProcessGroup | None = None) -> None:
        self._parts = Parts(self.num_parts, num_processes=BatchSplit.of(strategy).dp_size, group=group)
        if isinstance(strategy, CustomForwardStrategy):
            strategy.use_parts(self._parts)

    # The hooks of the Trainer.

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let the kernels be the same on any number of processes."""
        strategy = trainer.strategy
        if strategy.root_device.type == "cpu":
            torch.set_num_threads(1)  # their number decides how oneDNN divides a sum
        self._are_microbatches = isinstance(strategy, PipelineStrategy)
        self._divide(strategy, group=getattr(strategy, "data_group", None))
        pl_module.virtual_replicas = self  # type: ignore[assignment]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take every gradient as soon as it is there; DistributedDataParallel averages nothing."""
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            trainer.strategy.model.require_backward_grad_sync = False
        if not isinstance(trainer.strategy, ShardedStrategy):  # which hands gradients to a reduction in the tree
            self._parts.watch(pl_module.parameters())
        self._clip = trainer.precision_plugin.clip_grad_by_norm
        whole = _with_whole_gradient(trainer.strategy)
        trainer.precision_plugin.clip_grad_by_norm = partial(clip_in_order, group=whole)  # type: ignore[method-assign]

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give parameters and buffers the mean over all parts."""
        self._parts.average()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._parts.unwatch()
        trainer.precision_plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, CustomForwardStrategy):
            trainer.strategy.use_parts(None)
        pl_module.virtual_replicas = None  # type: ignore[assignment]


def _with_whole_gradient(strategy: Strategy) -> dist.ProcessGroup | None:
    """The processes that together have the whole gradient once; None if each has it."""
    if isinstance(strategy, PipelineStrategy):
        return strategy.model_group
    return strategy.data_group if isinstance(strategy, ShardedStrategy) else None
