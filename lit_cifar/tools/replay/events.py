"""A record: calls, backward passes and optimizer steps of each rank, in their order, and how they are read back.

Ranks that hold a replica together each write down what is theirs. Together they are one, as `join` makes it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lit_cifar.internals import tree_leaves
from lit_cifar.tools.replay.attributes import Attributes
from lit_cifar.tools.replay.digests import Digest, Surroundings, digest
from lit_cifar.tools.replay.exchange import Exchange

Digests: TypeAlias = dict[str, Digest]
Tensors: TypeAlias = dict[str, Tensor]


@dataclass
class Call:
    """A call of `training_step`, or of a plain module."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    surroundings: Surroundings
    parameters: Digests
    changed: Tensors  # parameters that something else than an optimizer has changed since the last event
    buffers: Tensors
    attributes: Attributes
    progress: dict[str, Any]  # the trainer's counters
    outputs: list[Digest] = field(default_factory=list)
    output_grads: list[Tensor | None] = field(default_factory=list)  # of the outputs that a backward pass began at
    buffers_after: Digests = field(default_factory=dict)
    has_drawn: bool = False  # random numbers
    ended: tuple[int, ...] = ()  # digests of the generators' states at its end
    exchanges: list[Exchange] = field(default_factory=list)  # with other ranks, those of inner backward passes too
    beside: bool = False  # whether ranks have sent one another, outside of calls, what parts of a model send


@dataclass
class Backward:
    """A backward pass, at its end."""

    inside: bool  # of a call: by manual optimization
    synced: bool  # whether gradients were averaged over the ranks
    surroundings: Surroundings | None  # at its beginning, where that was seen
    local: dict[str, list[Digest]]  # what it has added to each parameter's gradient, before any reduction
    fresh: list[str]  # parameters that had no gradient before, or zeros
    grads: Digests  # of `.grad` afterwards
    values: Tensors  # those themselves, where synced and in the first replica
    exchanges: list[Exchange]  # with other ranks


@dataclass
class Step:
    inside: bool
    optimizer: int
    surroundings: Surroundings
    groups: list[dict[str, Any]]  # learning rates and the like
    grads: Digests  # that it has used
    values: Tensors  # those themselves in the first replica, where they have changed since the backward pass
    after: Digests  # parameters and its state


Event: TypeAlias = Call | Backward | Step


@dataclass
class Start:
    """What a rank begins with, where that of rank 0 is not all."""

    values: Tensors  # of parameters
    states: list[dict[str, Any]]  # of each optimizer


def join(event: Event, other: Event) -> str:
    """Give `event` what `other` has of its own, and return what both must have alike and have not, in words."""
    for name, value in vars(event).items():
        if isinstance(value, dict):
            setattr(event, name, {**getattr(other, name), **value})
    if isinstance(event, Backward) and isinstance(other, Backward):
        event.fresh += other.fresh
    if isinstance(event, Step) and isinstance(other, Step) and event.groups != other.groups:
        return f"{other.groups}, not {event.groups}"
    if isinstance(event, Call) and isinstance(other, Call):
        if _bits(event.inputs) != _bits(other.inputs):
            return "another batch"
        if event.outputs != other.outputs:
            return "another loss"
    return ""


def _bits(inputs: Any) -> list[int]:
    return [digest(leaf).bits for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


@dataclass
class Record:
    """The events of all ranks in a folder."""

    folder: Path
    num_ranks: int
    device: torch.device

    def remarks(self) -> tuple[list[str], list[str]]:
        """Why a rank could not write down what it did; and what it has noticed beside."""
        reasons: list[str] = []
        hints: list[str] = []
        for rank in range(self.num_ranks):
            path = self.folder / f"{rank}.pt"
            if path.exists():
                of_rank = torch.load(path, weights_only=True)
                reasons += of_rank[0]
                hints += of_rank[1]
            else:
                reasons.append(f"the record of rank {rank} cannot be seen from rank 0")
        return [*dict.fromkeys(reasons)], [*dict.fromkeys(hints)]

    def segments(self, rank: int) -> list[list[Path]]:
        """Paths of events, in their order; a segment ends with the last optimizer step before another call."""
        found: list[list[Path]] = []
        stepped = True
        for path in sorted(self.folder.glob(f"{rank}-*.pt")):
            if path.stem.endswith(Call.__name__) and stepped:
                found.append([])
            stepped = path.stem.endswith(Step.__name__) or (stepped and not path.stem.endswith(Call.__name__))
            found[-1].append(path)
        return found

    def load(self, path: Path) -> Any:
        """Batches may hold any objects. The ranks of this very run have written them, where nobody else can write."""
        return torch.load(path, map_location=self.device, weights_only=False)

    def starts(self) -> list[Start]:
        return [self.load(path) for path in self.folder.glob("start-*.pt")]

    @property
    def mebibytes(self) -> float:
        return sum(path.stat().st_size for path in self.folder.iterdir()) / 2**20


class UnjudgeableError(Exception):
    """Why something cannot be replayed."""
