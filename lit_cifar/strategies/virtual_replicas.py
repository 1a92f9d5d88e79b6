"""`--virtual_replicas=V`: training ends with the same bits on every number of processes that divides V.

On two devices a batch is summed in another order than on one, and the kernels see other shapes, so that the results
round differently. Here a global batch is cut into V parts on any number of processes. Each part passes forward and
backward by itself, and is normalised by itself (ghost batch normalisation, Hoffer et al., 2017). The gradients of the
parts are summed in the order of one fixed binary tree, whose subtrees the processes hold. The same is done for the
running statistics of BatchNorm: from those before the step each part makes its own, and their mean is kept.

The idea of parts that do not depend on the devices is that of Or, Zhang and Freedman, "VirtualFlow", MLSys 2022; equal
bits are the aim of Li et al., "EasyScale", SC 2023.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.errors import ConfigError
from lit_cifar.layout import Layout
from lit_cifar.strategies.loss_scaling import loss_scale


class VirtualReplicas(Callback):
    """Cuts batches into parts, and gives the optimizer the mean of the parts' gradients.

    Part v of V has the positions v, v + V, ... of a global batch. Process r of R reads the positions r, r + R, ... and
    so holds the parts r, r + R, ...

    Args:
        num_parts: V, a power of two that the global batch can be divided by.
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self._num_processes = 1
        self._gradients: dict[nn.Parameter, TreeSum] = {}
        self._buffers: list[TreeSum] = []
        self._handles: list[Any] = []

    # What the module calls in the place of its own pass over a batch.

    def train(self, module: L.LightningModule, batch: Batch, loss_of: Callable[[Batch], Tensor]) -> Tensor:
        """Forward and backward of all parts but the last, whose loss is returned for the backward of Lightning."""
        *first, last = self._parts(batch)
        for parameter, total in self._gradients.items():
            parameter.grad = None  # of the step before: Lightning forgets it only after this
            total.clear()  # of what a run that is resumed does before its first step
        buffers = [*module.network.buffers()]  # type: ignore[union-attr]  # it has been checked
        before = [buffer.clone() for buffer in buffers]
        strategy = module.trainer.strategy
        scale = loss_scale(strategy.precision_plugin, strategy.root_device)
        for part in first:
            loss = self._forward(part, loss_of, buffers) * scale
            with torch.autocast(loss.device.type, enabled=False):
                loss.backward()  # type: ignore[no-untyped-call]
            torch.clear_autocast_cache()  # weights that were cast belong to the graph that is gone
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        return self._forward(last, loss_of, buffers)

    def _forward(self, part: Batch, loss_of: Callable[[Batch], Tensor], buffers: list[Tensor]) -> Tensor:
        loss = loss_of(part)
        self._buffers = self._buffers or [TreeSum() for _ in buffers]
        for total, buffer in zip(self._buffers, buffers, strict=True):
            total.push(buffer.clone())
        return loss

    def evaluate(self, images: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits (n, num_classes) of the images (n, ...) of this process, whose parts go forward one by one."""
        count = self.num_parts // self._num_processes
        logits = [forward(images[place::count]) for place in range(count) if len(images[place::count])]
        whole = logits[0].new_empty(len(images), *logits[0].shape[1:])
        for place, part in enumerate(logits):
            whole[place::count] = part
        return whole

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """This process's parts in the order of the tree; the weight of each is that of its samples among all."""
        count = self.num_parts // self._num_processes
        average = len(batch.labels) / batch.weight  # samples of a process
        for place in in_tree_order(count):
            images, labels, ids = (values[place::count] for values in batch[:3])
            yield Batch(images, labels, ids, len(labels) * count / average)

    # The hooks of the Trainer.

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let the kernels be the same on any number of processes."""
        self._num_processes = Layout.of(trainer.strategy).num_shards
        if trainer.strategy.root_device.type == "cpu":
            torch.set_num_threads(1)  # their number decides how oneDNN divides a sum
        pl_module.virtual_replicas = self  # type: ignore[assignment]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take every gradient as soon as it is there; DistributedDataParallel averages nothing."""
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            trainer.strategy.model.require_backward_grad_sync = False
        trained = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        self._gradients = {parameter: TreeSum() for parameter in trained}
        self._handles = [parameter.register_post_accumulate_grad_hook(self._take) for parameter in trained]  # type: ignore[no-untyped-call]

    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self._gradients[parameter].push(parameter.grad)
        parameter.grad = None

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give parameters and buffers the mean over all parts."""
        trained = [parameter for parameter, total in self._gradients.items() if not total.is_empty]
        buffers = [*pl_module.network.buffers()]  # type: ignore[union-attr]
        floating = [(b, total) for b, total in zip(buffers, self._buffers, strict=True) if b.is_floating_point()]
        totals = [self._gradients[parameter].take() for parameter in trained] + [total.take() for _, total in floating]
        means = iter(self._means(totals))
        for parameter in trained:
            parameter.grad = next(means)
        for buffer, _ in floating:
            buffer.copy_(next(means))
        self._buffers = []

    def _means(self, totals: list[Tensor]) -> list[Tensor]:
        """The means over all parts, from the sums over those of this process."""
        scale = 1 / self.num_parts  # a power of two: nothing is rounded
        if self._num_processes == 1:
            return [total * scale for total in totals]
        flat = tree_all_reduce(torch.cat([total.flatten() for total in totals])) * scale
        parts = torch.split(flat, [total.numel() for total in totals])
        return [part.view_as(total) for part, total in zip(parts, totals, strict=True)]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for handle in self._handles:
            handle.remove()
        self._gradients, self._handles = {}, []

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        pl_module.virtual_replicas = None  # type: ignore[assignment]

    # What would change the bits.

    def check(self, trainer: L.Trainer, data: CIFAR10DataModule) -> None:
        """Refuse what would change the bits, before any process is started.

        Raises:
            ConfigError: A mode, a number of processes, or sizes that do not fit.
        """
        name, strategy = f"--virtual_replicas={self.num_parts}", trainer.strategy
        if self.num_parts < 1 or self.num_parts & (self.num_parts - 1):
            nearest = 1 << max(0, self.num_parts.bit_length() - 1)
            raise ConfigError(
                f"{name} is no power of two, and a binary tree adds the parts",
                remedy=f"pass --virtual_replicas={nearest} or {2 * nearest}",
            )
        if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy) or hasattr(strategy, "make_runner"):
            raise ConfigError(
                f"{name} is for one device, ddp and ddp_spawn; other modes add gradients in an order of their own",
                remedy="leave it out, or pass --trainer.strategy=ddp",
            )
        if self.num_parts % (num_processes := Layout.of(strategy).num_shards):
            raise ConfigError(
                f"{name} cannot be divided among {num_processes} processes",
                remedy=f"pass --trainer.devices={1 << (min(num_processes, self.num_parts).bit_length() - 1)}",
            )
        if trainer.accumulate_grad_batches > 1:
            accumulated = trainer.accumulate_grad_batches
            raise ConfigError(
                f"{name} with --trainer.accumulate_grad_batches={accumulated} would add gradients in another order",
                remedy="leave out the latter: the parts of a batch pass one after the other already",
            )
        self._check_sizes(data)

    def _check_sizes(self, data: CIFAR10DataModule) -> None:
        for flag, size in (("batch_size", data.batch_size), ("eval_batch_size", data.eval_batch_size)):
            if size % self.num_parts:
                raise ConfigError(
                    f"--data.{flag}={size} does not divide into {self.num_parts} virtual replicas",
                    remedy=f"pass --data.{flag}={max(1, size // self.num_parts) * self.num_parts}",
                )
        rest = len(data.sets["train"]) % data.batch_size if "train" in data.sets else 0
        if rest and not data.drop_last and rest < 2 * self.num_parts:
            raise ConfigError(
                f"the last batch of an epoch has {rest} images for {self.num_parts} virtual replicas; each needs 2",
                remedy="pass --data.drop_last=true, or change --data.batch_size or --data.val_size",
            )


class TreeSum:
    """The sum of tensors that come one by one, in the order of a binary tree over them.

    The first and the second are added, then the third and the fourth, then these two sums, and so on, like the carries
    of a binary counter. At most log2(n) + 1 tensors are kept.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Tensor]] = []  # the number of tensors in each, and their sum

    @property
    def is_empty(self) -> bool:
        return not self._sums

    def push(self, value: Tensor) -> None:
        """Add a tensor."""
        count = 1
        while self._sums and self._sums[-1][0] == count:
            _, left = self._sums.pop()
            value, count = left + value, 2 * count
        self._sums.append((count, value))

    def take(self) -> Tensor:
        """The sum of all, which are forgotten; their number must be a power of two."""
        ((_, total),) = self._sums
        self.clear()
        return total

    def clear(self) -> None:
        self._sums = []


def in_tree_order(count: int) -> list[int]:
    """The numbers 0 to count - 1 by their bits read backwards, so that all that are equal modulo 2**k lie together."""
    width = count.bit_length() - 1
    return sorted(range(count), key=lambda number: int(f"{number:0{width}b}"[::-1], 2) if width else 0)


def tree_sum(values: Iterable[Tensor]) -> Tensor:
    """Their sum in the order of the tree; their number is a power of two."""
    total = TreeSum()
    for value in values:
        total.push(value)
    return total.take()


def tree_all_reduce(flat: Tensor) -> Tensor:
    """The sum of `flat`, (n,), over all processes, in the order of the tree over the parts that they hold.

    Each process adds a slice of all and sends the result to all, which is the traffic of a ring.
    """
    count = dist.get_world_size()
    padded = F.pad(flat, (0, -len(flat) % count))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded)
    slices = received.view(count, -1)
    total = tree_sum(slices[rank] for rank in in_tree_order(count))
    dist.all_gather_into_tensor(received, total)
    return received[: len(flat)]
