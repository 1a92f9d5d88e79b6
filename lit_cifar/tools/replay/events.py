"""What a record holds: calls, backward passes and optimizer steps of one rank, in their order."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from lit_cifar.tools.replay.digests import Digest, Surroundings
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
    attributes: dict[tuple[str, str], Any]  # plain values by submodule and name
    progress: dict[str, Any]  # the trainer's counters
    outputs: list[Digest] = field(default_factory=list)
    output_grads: list[Tensor | None] = field(default_factory=list)  # of the outputs that a backward pass began at
    buffers_after: Digests = field(default_factory=dict)
    has_drawn: bool = False  # random numbers
    exchanges: list[Exchange] = field(default_factory=list)  # with other ranks, those of inner backward passes too


@dataclass
class Backward:
    """A backward pass, at its end."""

    inside: bool  # of a call: by manual optimization
    synced: bool  # whether gradients were averaged over the ranks
    local: dict[str, list[Digest]]  # what it has added to each parameter's gradient, before any reduction
    fresh: list[str]  # parameters that had no gradient before, or zeros
    grads: Digests  # of `.grad` afterwards
    values: Tensors  # those themselves, where synced and on rank 0
    exchanges: list[Exchange]  # with other ranks


@dataclass
class Step:
    """A step of an optimizer."""

    inside: bool
    optimizer: int
    surroundings: Surroundings
    groups: list[dict[str, Any]]  # learning rates and the like
    grads: Digests  # that it has used
    values: Tensors  # those themselves on rank 0, where clipping or a hook has changed them since the backward pass
    after: Digests  # parameters and its state


Event: TypeAlias = Call | Backward | Step


class UnjudgeableError(Exception):
    """Why something cannot be replayed."""
