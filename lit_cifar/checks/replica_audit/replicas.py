"""Tensors that several ranks hold, and the ranks whose tensors differ."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_cifar import internals
from lit_cifar.checks.tensors import dense
from lit_cifar.mode import mode_of

_CHUNK = 2**18  # words that are added at a time: 2 MiB of each of two intermediate results
_FACTOR = 0x9E3779B1


@dataclass(frozen=True)
class Disagreement:
    """A tensor that is not the same on all ranks that hold it."""

    name: str
    ranks: tuple[int, ...]  # ranks that differ from the majority; all ranks, if there is none
    num_others: int  # size of the majority; 0 if there is none

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        if not self.num_others:
            return f"  {self.name}: {ranks} differ, and there is no majority"
        return f"  {self.name}: {ranks} differ{'s' * (len(self.ranks) == 1)} from the {self.num_others} others"


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
    """The tensors that this rank holds and others hold too."""

    def __init__(self, trainer: Trainer, module: nn.Module) -> None:
        strategy: Any = trainer.strategy
        self._module, self._optimizers = module, trainer.optimizers
        self._device = strategy.root_device
        self._group = mode_of(strategy).data_group or dist.group.WORLD
        # Ranks that hold a replica together hold copies of tensors that others of them train, and these may be old.
        self._left_out = mode_of(strategy).trained_elsewhere() | {*_own_statistics(module)}
        self._first = {name: device_digest(buffer).item() for name, buffer in self._buffers()}
        self._ignored: set[str] | None = None  # buffers that each rank changes in its own way

    def disagreements(self) -> list[Disagreement]:
        """Tensors that are not the same in all replicas; every rank must call this and gets the same."""
        found = self._found_in_buffers() if self._ignored is None else []
        digests = {name: device_digest(tensor) for name, tensor in self._tensors()}
        digests = {"": torch.zeros((), dtype=torch.int64)} | digests  # a stage of a pipeline may have no tensors
        weights = torch.tensor([2 * crc32(name.encode()) + 1 for name in digests], device=self._device)
        own = (torch.stack([value.to(self._device) for value in digests.values()]) * weights).sum()
        least = torch.stack([own, ~own])  # the complement of the least complement is the largest
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        apart = (least[0] != ~least[1]).int()
        if self._group is not dist.group.WORLD:
            dist.all_reduce(apart, op=dist.ReduceOp.MAX)
        if apart.item():
            groups = self._gathered({name: value.item() for name, value in digests.items()})
            found += dict.fromkeys(each for ranks, of_ranks in groups for each in disagreements(ranks, of_ranks))
        return found

    def _gathered(self, value: Any) -> Iterator[tuple[Sequence[int], list[Any]]]:
        """The ranks of each group of replicas, and their values."""
        of_ranks = of_all_ranks((dist.get_process_group_ranks(self._group), value))
        for rank, (ranks, _) in enumerate(of_ranks):
            if rank == ranks[0]:
                yield ranks, [of_ranks[each][1] for each in ranks]

    def _found_in_buffers(self) -> list[Disagreement]:
        """Differences of constant buffers. Buffers that most ranks have changed are statistics, which may differ."""
        now = {name: device_digest(buffer).item() for name, buffer in self._buffers()}
        self._ignored = set()
        found = []
        for ranks, of_ranks in self._gathered({name: (bits, bits != self._first[name]) for name, bits in now.items()}):
            for name in of_ranks[0]:
                values = [of_rank[name] for of_rank in of_ranks]
                if len(set(values)) > 1:
                    self._ignored.add(name)
                    if 2 * sum(changed for _, changed in values) <= len(ranks):
                        found += disagreements(ranks, [{name: value} for value in values])
        return found

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self._module.named_buffers():
            if buffer not in self._left_out:
                yield f"{name} (buffer)", buffer

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        yield from ((name, parameter) for parameter, name in names.items() if parameter not in self._left_out)
        for optimizer in self._optimizers:
            if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
                continue  # each rank holds a part
            for parameter, state in optimizer.state.items():
                if parameter not in self._left_out:
                    for key, value in state.items():
                        if isinstance(value, Tensor):
                            yield f"{names.get(parameter, '?')} ({key} of {type(optimizer).__name__})", value
        for name, buffer in self._buffers():
            if name not in (self._ignored or ()):
                yield name, buffer


def of_all_ranks(value: Any) -> list[Any]:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    return of_ranks


def device_digest(tensor: Tensor) -> Tensor:
    """An int64 on the tensor's device, (), which one flipped bit always changes.

    The tensor's bytes, eight of which are an integer, are added with odd weights that depend on their place, modulo
    2**64. A flip changes an integer by a power of two, which an odd number does not divide.
    """
    flat = dense(tensor.detach()).reshape(-1)
    if flat.stride(0) != 1:  # of a vector that is a part of another tensor
        flat = flat.clone(memory_format=torch.contiguous_format)
    octets = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)
    rest = len(octets) % 8
    if rest or octets.storage_offset() % 8:
        octets = nn.functional.pad(octets, (0, -rest % 8))
    words = octets.view(torch.int64)
    weights = _weights(_CHUNK, octets.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        total += (chunk * weights[: len(chunk)]).sum() + 2 * _FACTOR * start * chunk.sum()
    return total


@cache
def _weights(number: int, device: torch.device) -> Tensor:
    return 2 * _FACTOR * torch.arange(number, device=device) + 1


def disagreements(ranks: Sequence[int], of_ranks: Sequence[Mapping[str, Any]]) -> list[Disagreement]:
    """Tensors that are not the same on all ranks. Of two ranks that differ nobody can say which is right."""
    found = []
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        values = [of_rank.get(name) for of_rank in of_ranks]
        (common, number), *others = Counter(values).most_common()
        if not others:
            continue
        if 2 * number > len(values):
            wrong = tuple(rank for rank, value in zip(ranks, values, strict=True) if value != common)
            found.append(Disagreement(name, wrong, number))
        else:
            found.append(Disagreement(name, tuple(ranks), 0))
    return found


def _own_statistics(module: nn.Module) -> Iterator[Tensor]:
    """The running statistics of layers that normalise each rank's part of a batch by itself."""
    for layer in module.modules():
        if isinstance(layer, internals.NormBase) and not isinstance(layer, nn.SyncBatchNorm):
            yield from layer.buffers(recurse=False)
