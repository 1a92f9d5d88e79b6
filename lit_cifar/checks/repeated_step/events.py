"""A record: calls, backward passes and optimizer steps of each rank, in their order, and how they are read back.

Ranks that hold a replica together each write down their own parts, which `join` puts together.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lit_cifar.checks.repeated_step.attributes import Attributes
from lit_cifar.checks.repeated_step.digests import Digest, Surroundings, digest
from lit_cifar.checks.repeated_step.exchange import Exchange
from lit_cifar.internals import tree_leaves

Digests: TypeAlias = dict[str, Digest]
Tensors: TypeAlias = dict[str, Tensor]


@dataclass
class Call:
    """A call of `training_step`, or of a plain module."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    surroundings: Surroundings
    parameters: Digests
    changed: Tensors  # parameters that anything but an optimizer has changed since the last event
    buffers: Tensors
    attributes: Attributes
    progress: dict[str, Any]  # the trainer's counters
    outputs: list[Digest] = field(default_factory=list)
    output_grads: list[Tensor | None] = field(default_factory=list)  # None where no backward pass began
    buffers_after: Digests = field(default_factory=dict)
    has_drawn: bool = False  # whether random numbers were drawn
    ended: tuple[int, ...] = ()  # digests of the generators' states at the end of the call
    exchanges: list[Exchange] = field(default_factory=list)  # those of inner backward passes too
    beside: bool = False  # whether ranks have exchanged, outside of calls, tensors of a kind that parts of a model send


@dataclass
class Backward:
    synced: bool  # whether gradients were averaged over the ranks
    surroundings: Surroundings | None  # surroundings at its beginning, where that was seen
    local: dict[str, list[Digest]]  # its additions to each parameter's gradient, before any reduction
    fresh: list[str]  # parameters that had no gradient before, or zeros
    grads: Digests  # digests of `.grad` afterwards
    values: Tensors  # these gradients themselves, where synced and in the first replica
    exchanges: list[Exchange]  # exchanges with other ranks


@dataclass
class Step:
    inside: bool  # whether it is inside of a call, by manual optimization
    optimizer: int
    surroundings: Surroundings
    groups: list[dict[str, Any]]  # learning rates and the like
    grads: Digests  # digests of the gradients that it has used
    values: Tensors  # these gradients themselves in the first replica, where they have changed since the backward pass
    after: Digests  # digests of parameters and optimizer state
    scaling: Tensors  # what a GradScaler tells an optimizer with fused kernels for this step


Event: TypeAlias = Call | Backward | Step


@dataclass
class Start:
    """The values that a rank begins with, where rank 0 does not hold all."""

    values: Tensors  # values of parameters
    states: list[dict[str, Any]]  # state of each optimizer


def join(event: Event, other: Event) -> str:
    """Add the own parts of `other` to `event`. Return a difference where both must be alike, in words."""
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
class Recording:
    folder: Path
    num_ranks: int
    device: torch.device

    def remarks(self) -> tuple[list[str], list[str]]:
        """Reasons why ranks could not write down all, and their hints."""
        reasons: list[str] = []
        hints: list[str] = []
        for rank in range(self.num_ranks):
            path, absent = self.folder / f"{rank}.pt", [f"the record of rank {rank} cannot be seen from rank 0"]
            why, seen = torch.load(path, weights_only=True) if path.exists() else (absent, [])
            reasons += why
            hints += seen
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
        """Load an event. Batches may hold any objects: this run's ranks have written them, where nobody else can."""
        return torch.load(path, map_location=self.device, weights_only=False)

    def starts(self) -> list[Start]:
        return [self.load(path) for path in self.folder.glob("start-*.pt")]

    @property
    def mebibytes(self) -> float:
        return sum(path.stat().st_size for path in self.folder.iterdir()) / 2**20


class UnjudgeableError(Exception):
    """The reason why something cannot be replayed."""
