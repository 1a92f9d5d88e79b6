"""Tensors that several ranks hold, and the ranks whose tensors differ."""

from collections.abc import Iterator
from functools import cache
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lit_cifar import internals
from lit_cifar.checks.compare import Disagreement, disagreement
from lit_cifar.checks.tensors import as_real, dense
from lit_cifar.mode import mode_of

_CHUNK = 2**18  # words that are added at a time: 2 MiB of each of two intermediate results
_FACTOR = 0x9E3779B1


def why_not_compared(trainer: Trainer) -> str:
    """The reason why the processes of a run have nothing to compare; "" if they have."""
    for error in internals.missing(internals.AUDIT):
        return error.problem
    if any(isinstance(parameter, DTensor) for parameter in trainer.lightning_module.parameters()):
        return "the processes hold parts of the parameters"
    mode = mode_of(trainer.strategy)
    if not mode.is_known:
        return f"what {type(trainer.strategy).__name__} holds in each process is not known here"
    if mode.layout.data_parallel_size == 1:
        return "the processes hold one replica together"
    if mode.averages_by_hook:
        return "a communication hook may let them differ"
    return ""


class HeldTensors:
    """The tensors that this rank holds and others hold too.

    `DistributedDataParallel` keeps the parameters equal that it trains, and with them what an optimizer knows of these.
    Nothing keeps other parameters and buffers equal once a training has begun.
    """

    def __init__(self, trainer: Trainer, module: nn.Module) -> None:
        strategy: Any = trainer.strategy
        self._module, self._ddp, self._optimizers = module, strategy.model, trainer.optimizers
        self._device = strategy.root_device
        self._group = mode_of(strategy).data_group or dist.group.WORLD
        # Ranks that hold a replica together hold copies of tensors that others of them train, and these may be old.
        self._left_out = mode_of(strategy).trained_elsewhere() | {*_own_statistics(module)}
        self._returned: set[str] = set()  # what nothing keeps equal, and has differed

    def disagreements(self) -> tuple[list[Disagreement], list[Disagreement]]:
        """What differs between replicas though it is kept equal, and what else differs, which is returned once.

        Every rank must call this and gets the same.
        """
        held = {name: (device_digest(its), kept) for name, its, kept in self._tensors() if name not in self._returned}
        # A stage of a pipeline may have no tensors.
        digests = {"": torch.zeros((), dtype=torch.int64)} | {name: value for name, (value, _) in held.items()}
        weights = torch.tensor([2 * crc32(name.encode()) + 1 for name in digests], device=self._device)
        own = (torch.stack([value.to(self._device) for value in digests.values()]) * weights).sum()
        least = torch.stack([own, ~own])  # the complement of the least complement is the largest
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        apart = (least[0] != ~least[1]).int()
        if self._group is not dist.group.WORLD:
            dist.all_reduce(apart, op=dist.ReduceOp.MAX)
        if not apart.item():
            return [], []
        return self._gathered({name: (int(value), is_kept) for name, (value, is_kept) in held.items()})

    def _gathered(self, held: dict[str, tuple[int, bool]]) -> tuple[list[Disagreement], list[Disagreement]]:
        """Compare the digests within each group of replicas."""
        of_ranks: list[Any] = [None] * dist.get_world_size()  # the ranks of a group, and digests
        dist.all_gather_object(of_ranks, (dist.get_process_group_ranks(self._group), held))
        kept: dict[Disagreement, None] = {}
        others: dict[Disagreement, None] = {}
        for ranks in dict.fromkeys(tuple(ranks) for ranks, _ in of_ranks):
            by_rank = {rank: of_ranks[rank][1] for rank in ranks}
            for name in dict.fromkeys(name for of_rank in by_rank.values() for name in of_rank):
                values = {rank: of_rank.get(name, (None, False)) for rank, of_rank in by_rank.items()}
                if found := disagreement(name, {rank: value for rank, (value, _) in values.items()}):
                    is_kept = all(is_kept for _, is_kept in values.values())  # one rank may hold a state for all
                    (kept if is_kept else others)[found] = None
        self._returned |= {found.name for found in others}
        return [*kept], [*others]

    def _tensors(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Name, tensor, and whether it is kept equal."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        ignored = self._ddp.parameters_to_ignore if isinstance(self._ddp, DistributedDataParallel) else ()
        kept = {parameter for parameter, name in names.items() if parameter.requires_grad and name not in ignored}
        held = [(name, parameter, parameter in kept) for parameter, name in names.items()]
        held += [(f"{name} (buffer)", buffer, False) for name, buffer in self._module.named_buffers()]
        yield from (each for each in held if each[1] not in self._left_out)
        for optimizer in self._optimizers:
            if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
                continue  # each rank holds a part
            for parameter, state in optimizer.state.items():
                if parameter in kept and parameter not in self._left_out:
                    for key, value in state.items():
                        if isinstance(value, Tensor):
                            yield f"{names[parameter]} ({key} of {type(optimizer).__name__})", value, True


def device_digest(tensor: Tensor) -> Tensor:
    """An int64 on the tensor's device, (), which one flipped bit always changes.

    The tensor's bytes, eight of which are an integer, are added with odd weights that depend on their place, modulo
    2**64. A flip changes an integer by a power of two, which an odd number does not divide.
    """
    flat = dense(tensor.detach()).reshape(-1)
    if flat.stride(0) != 1:  # of a vector that is a part of another tensor
        flat = flat.clone(memory_format=torch.contiguous_format)
    octets = as_real(flat).reshape(-1).view(torch.uint8)
    rest = len(octets) % 8
    if rest or octets.storage_offset() % 8:
        octets = nn.functional.pad(octets, (0, -rest % 8))
    words, weights = octets.view(torch.int64), _weights(octets.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        total += (chunk * weights[: len(chunk)]).sum() + 2 * _FACTOR * start * chunk.sum()
    return total


@cache
def _weights(device: torch.device) -> Tensor:
    return 2 * _FACTOR * torch.arange(_CHUNK, device=device) + 1


def _own_statistics(module: nn.Module) -> Iterator[Tensor]:
    """The running statistics of layers that normalise each rank's part of a batch by itself."""
    for layer in module.modules():
        if isinstance(layer, internals.NormBase) and not isinstance(layer, nn.SyncBatchNorm):
            yield from layer.buffers(recurse=False)
