"""`--virtual_replicas=V`: training ends with the same bits on every number of processes that divides V.

On two devices a batch is summed in another order than on one, and the kernels get other shapes. So the results round
differently. Here a global batch is cut into V parts on any number of processes. Each part passes forward and backward
by itself, and is normalised by itself (ghost batch normalisation, Hoffer et al., 2017). The gradients of the parts are
summed in the order of one fixed binary tree, whose subtrees the processes hold. The running statistics of BatchNorm are
treated alike: each part updates a copy of those before the step, and the mean of the copies is kept.

The idea of parts that do not depend on the devices is that of Or, Zhang and Freedman, "VirtualFlow", MLSys 2022; equal
bits are the aim of Li et al., "EasyScale", SC 2023.
"""

from collections.abc import Callable
from functools import partial

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.data.samplers import FULL_BATCHES
from lit_cifar.errors import ConfigError, clash
from lit_cifar.mode import mode_of
from lit_cifar.models.random_streams import draw_for_part
from lit_cifar.strategies.base import CustomForwardStrategy, compiles
from lit_cifar.strategies.fsdp2 import ShardedStrategy
from lit_cifar.strategies.mesh import clip_by_whole_norm, loss_scale
from lit_cifar.strategies.parts import VirtualParts, reduce_in_tree
from lit_cifar.strategies.pp import PipelineStrategy
from lit_cifar.task.muon import MuonSGD


class VirtualReplicas(Callback):
    """Cuts batches into parts, and gives the optimizer the mean of the parts' gradients.

    Args:
        num_parts: V, a power of two that the global batch can be divided by.
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self._parts = VirtualParts(num_parts)
        self._are_microbatches = False

    def train(self, module: L.LightningModule, batch: Batch, loss_of: Callable[[Batch], Tensor]) -> Tensor:
        """Forward and backward of all parts but the last, whose loss is returned for the backward of Lightning."""
        *first, last = self._parts.cut(batch)
        if self._are_microbatches:  # the pipeline has already run forward and backward
            for part in first:
                loss_of(part)
            return loss_of(last)
        self._parts.start_step(module.network.buffers())  # type: ignore[union-attr]  # it has been checked
        strategy = module.trainer.strategy
        scale = loss_scale(strategy.precision_plugin, strategy.root_device)
        *places, last_place = self._parts.places
        for place, part in zip(places, first, strict=True):
            draw_for_part(place)
            with self._parts.own_statistics():
                loss = loss_of(part) * scale
            with torch.autocast(loss.device.type, enabled=False):
                loss.backward()  # type: ignore[no-untyped-call]
            torch.clear_autocast_cache()  # weights that were cast belong to the graph that is gone
        draw_for_part(last_place)
        with self._parts.own_statistics():
            return loss_of(last)

    def evaluate(self, images: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits (n, num_classes) of this process's images (n, ...), whose parts go forward one by one."""
        count = self._parts.count
        parts = [images[place::count] for place in range(count)]
        if self._are_microbatches:  # the pipeline cuts `images` at the ends of parts
            logits = [*torch.split(forward(torch.cat(parts)), [len(part) for part in parts])]
        else:
            logits = [forward(part) for part in parts]
        whole = logits[0].new_empty(len(images), *logits[0].shape[1:])
        for place, part in enumerate(logits):
            whole[place::count] = part
        return whole

    def check(self, trainer: L.Trainer, data: CIFAR10DataModule, optimizer: Optimizer | None) -> None:
        """Raise a `ConfigError` for settings that would change the bits; a run that trains has an `optimizer`."""
        num_parts, strategy, mode = self.num_parts, trainer.strategy, mode_of(trainer.strategy)
        name = f"--virtual_replicas={num_parts}"
        if num_parts < 1 or num_parts & (num_parts - 1):
            nearest = 1 << max(0, num_parts.bit_length() - 1)
            problem = f"{name} is no power of two, and a binary tree adds the parts"
            raise ConfigError(problem, remedy=f"pass --virtual_replicas={nearest} or {2 * nearest}")
        _check_strategy(name, strategy)
        if num_parts % (replicas := mode.layout.num_replicas):
            fewer = 1 << (min(replicas, num_parts).bit_length() - 1)
            remedy = f"change --trainer.devices, so that there are {fewer}"
            raise ConfigError(f"{name} cannot be divided among {replicas} replicas", remedy=remedy)
        if isinstance(optimizer, MuonSGD):
            flag = f"--model.optimizer={type(optimizer).__name__}"
            raise clash(name, flag, "its bits depend on how many matrices a process has")
        if trainer.accumulate_grad_batches > 1:
            raise clash(name, "--trainer.accumulate_grad_batches", "gradients would be added in another order")
        if mode.synchronises_batchnorm and mode.layout.data_parallel_size > 1:
            raise clash(name, "--trainer.sync_batchnorm=true", "each part is normalised by itself")
        _check_sizes(num_parts, data)
        self._divide(strategy)

    def _divide(self, strategy: Strategy, *, group: dist.ProcessGroup | None = None) -> None:
        num_processes = mode_of(strategy).layout.data_parallel_size
        self._parts = VirtualParts(self.num_parts, num_processes=num_processes, group=group)
        if isinstance(strategy, CustomForwardStrategy):
            strategy.use_virtual_parts(self._parts)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Make the kernels the same on any number of processes."""
        strategy = trainer.strategy
        if strategy.root_device.type == "cpu":
            torch.set_num_threads(1)  # the number of threads decides how oneDNN divides a sum
        self._are_microbatches = isinstance(strategy, PipelineStrategy)
        self._divide(strategy, group=mode_of(strategy).data_group)
        pl_module.virtual_replicas = self  # type: ignore[assignment]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take every gradient as soon as it is there; DistributedDataParallel averages nothing."""
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            trainer.strategy.model.require_backward_grad_sync = False
        if isinstance(trainer.strategy, ShardedStrategy):
            reduce_in_tree(pl_module.network, self._parts)  # type: ignore[arg-type]
        else:
            self._parts.take_gradients(pl_module.parameters())
        if not self._are_microbatches:  # a pipeline clips so by itself
            clip = partial(clip_by_whole_norm, device=trainer.strategy.root_device)
            trainer.precision_plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._parts.average()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._parts.leave_gradients()
        if isinstance(trainer.strategy, CustomForwardStrategy):
            trainer.strategy.virtual_parts = None
        pl_module.virtual_replicas = None  # type: ignore[assignment]

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give gradients back to whoever catches the exception and uses the network again."""
        self.teardown(trainer, pl_module, "fit")


def _check_strategy(name: str, strategy: Strategy) -> None:
    """Refuse what adds in another order, or with kernels whose bits differ between runs."""
    if not isinstance(strategy, CustomForwardStrategy | DDPStrategy | SingleDeviceStrategy):
        problem = f"{name} with {type(strategy).__name__}, which adds gradients in an order of its own"
        raise ConfigError(problem, remedy="leave it out, or pass --trainer.strategy=ddp")
    if isinstance(strategy, CustomForwardStrategy) and compiles(strategy.lightning_module):
        raise clash(name, "--model.compile=true", "a part of a network is compiled to other kernels than the whole")
    if strategy.root_device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        problem = f"{name} on a GPU needs kernels that always add in the same order"
        raise ConfigError(problem, remedy="pass --trainer.deterministic=true")
    if strategy.root_device.type == "cuda" and torch.backends.cudnn.benchmark:
        raise clash(name, "--trainer.benchmark=true", "kernels are chosen by how fast they are at that moment")


def _check_sizes(num_parts: int, data: CIFAR10DataModule) -> None:
    for flag, size in (("batch_size", data.batch_size), ("eval_batch_size", data.eval_batch_size)):
        if size % num_parts:
            remedy = f"pass --data.{flag}={max(1, size // num_parts) * num_parts}"
            raise ConfigError(f"--data.{flag}={size} does not divide into {num_parts} parts", remedy=remedy)
    rest = len(data.sets["train"]) % data.batch_size if "train" in data.sets else 0
    if rest and not data.order.drop_last and rest < 2 * num_parts:
        problem = f"the last batch of an epoch has {rest} images for {num_parts} virtual replicas; each needs 2"
        raise ConfigError(problem, remedy=FULL_BATCHES)
