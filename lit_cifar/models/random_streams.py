"""Random draws of a network in training, such as dropout's, that depend on its position, not on earlier draws.

Each part of a batch draws from a random stream of its own, and each block of the network from a stream within that. So
a resumed run draws what the uninterrupted one does, the parts differ from each other, and a block draws the same on
whichever process it is. A part is the share of a process, accumulation step, virtual replica, microbatch or replica of
`dp`. The first three all take every P-th sample, so that their P parts are the same ones.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.hooks import RemovableHandle

from lit_cifar import internals
from lit_cifar.data.counter_rng import Purpose, key_of
from lit_cifar.mode import mode_of
from lit_cifar.models.blocks import layers_of_blocks


@dataclass
class _Now:
    """Where this process's training is, set by `RandomStreams`; one object, as torch's generators are global too."""

    step: int | None = None  # key of seed and optimizer step; None outside of a training
    first: int = 0  # number of this process's first part in its accumulation step; the others follow at equal distance
    distance: int = 1
    part: int = 0  # key of the part
    calls: Counter[nn.Module] = field(default_factory=Counter)  # how often a block has been called in the part
    earlier: list[Counter[nn.Module]] = field(default_factory=list)  # the same when each stage begins
    on_cuda: bool = False


_now = _Now()


class RandomStreams(Callback):
    """Seeds torch's generators by a hash of (data seed, optimizer step, part of the batch, block)."""

    _handles: Sequence[RemovableHandle] = ()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._split = mode_of(trainer.strategy).layout
        _now.on_cuda = trainer.strategy.root_device.type == "cuda"
        # Networks of this package draw nothing, replicas of `dp` pass in threads, and torch.compile traces no seeding.
        in_turn = self._split.local_replicas == 1 or pl_module.virtual_replicas is not None
        if pl_module.header.network is not None and in_turn and not pl_module.compiles:  # type: ignore[union-attr]
            self._handles = [
                module.register_forward_pre_hook(partial(_draw_for_block, number))
                for number, module in enumerate(layers_of_blocks(pl_module.network))  # type: ignore[arg-type]
            ]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        seed: int = trainer.datamodule.seed  # type: ignore[attr-defined]  # Lightning's own omission
        _now.step = key_of(seed, Purpose.NETWORK, trainer.global_step)
        accumulation, size = trainer.accumulate_grad_batches, self._split.data_parallel_size
        _now.first = batch_idx % accumulation * size + self._split.data_parallel_rank  # see `TrainSampler`
        _now.distance = accumulation * size
        draw_for_part()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        vars(_now).update(vars(_Now()))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Who catches the exception may use the network again, with draws of their own."""
        self.on_train_end(trainer, pl_module)


def draw_for_part(place: int = 0, *, device: torch.device | None = None) -> None:
    """Draw for part `place` of this process's parts from now on; do nothing outside of a training.

    Processes that hold a replica together draw the same. With `device`, generators of other devices stay as they are.
    """
    if _now.step is not None:
        _now.part, _now.calls = key_of(_now.step, place * _now.distance + _now.first), Counter()
        _seed(_now.part, device)


def know_stages(stages: Iterable[nn.Module]) -> None:
    """Let a block that stands in several of `stages` draw something else in each; see `draw_for_stage`."""
    standing = (Counter(each for _, each in stage.named_modules(remove_duplicate=False)) for stage in stages)
    _now.earlier = [*accumulate(standing, initial=Counter[nn.Module]())]


def draw_for_stage(stage: int) -> None:
    """Draw for this stage of the part from now on; its blocks need not have streams of their own."""
    if _now.step is not None:
        _now.calls = _now.earlier[stage].copy()
        _seed(key_of(_now.part, -1 - stage))  # numbers of blocks are not negative


def _draw_for_block(number: int, module: nn.Module, inputs: Any) -> None:
    if _now.step is not None and module.training:
        again = internals.current_graph_task_id() >= 0  # in backward: a checkpointed call again, the last one first
        _now.calls[module] -= again
        _seed(key_of(_now.part, number + (_now.calls[module] << 32)))  # the chain may call it several times
        _now.calls[module] += not again


def _seed(seed: int, device: torch.device | None = None) -> None:
    # `torch.manual_seed` would take a quarter of a millisecond where there is no GPU.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    elif _now.on_cuda:
        torch.cuda.manual_seed_all(seed)
