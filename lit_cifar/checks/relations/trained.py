"""What one run shows by itself: parameters that nobody trains, gradients that stay, statistics of frozen layers."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lit_cifar.checks.relations.runs import Runs
from lit_cifar.checks.tensors import digest
from lit_cifar.checks.verdict import Verdict

NAME = "what is trained"
_SHOWN = 3  # names
_STEPS_TO_TELL = 2


@dataclass
class Observed:
    """What a process writes down."""

    mistakes: list[str] = field(default_factory=list)  # in words, what looks like one
    stale: int = 0  # steps that began with gradients of the step before
    owned: int = 0  # parameters of optimizers


def trained(runs: Runs) -> Iterator[Verdict]:
    own = runs.own()
    if not own.moved:
        text = "optimizers have other parameters than those that were made, as FSDP2 gives them"
        yield Verdict(NAME, "abstain", text)
        return
    seen = own.part(Observed)
    found = [*seen.mistakes]
    if seen.stale >= _STEPS_TO_TELL:
        found.append(f"gradients of the step before are added in {seen.stale} of {own.steps} steps: call zero_grad()")
    yield from (Verdict(NAME, "note", text) for text in found)
    if not found:
        yield Verdict(NAME, "pass", looked_at=f"each of {seen.owned} parameters changes")


def owned_by(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def digest_of(tensor: Tensor | None) -> int:
    """A digest; 0 of what this process does not hold."""
    return 0 if tensor is None or tensor.is_meta or is_lazy(tensor) else digest(tensor)


def statistics(roots: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """Digests of the buffers of each frozen layer that has parameters of its own, by its identity."""
    layers = (layer for root in roots for layer in root.modules())
    return {id(layer): tuple(map(digest_of, layer.buffers(recurse=False))) for layer in layers if _is_frozen(layer)}


def _is_frozen(layer: nn.Module) -> bool:
    own = [*layer.parameters(recurse=False)]
    return bool(own) and not any(parameter.requires_grad for parameter in own)


def mistakes(
    made: Sequence[nn.Parameter | None],
    first: Sequence[int],
    before: dict[int, tuple[int, ...]],
    frozen_first: Container[int],
    roots: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
) -> Iterator[str]:
    """In words, what does not change, or changes though it is frozen.

    When the training began, `first` were the digests of what was `made`, `before` those of `statistics`, and
    `frozen_first` the identities of frozen parameters. What is frozen in some steps only may change in others.
    """
    names = {id(parameter): name for root in roots for name, parameter in root.named_parameters()}
    own = {id(parameter) for parameter in owned_by(optimizers)}
    alive = [(parameter, was) for parameter, was in zip(made, first, strict=False) if parameter is not None and was]
    wanted = [(parameter, was) for parameter, was in alive if parameter.requires_grad]
    unmoved = [p for p, was in wanted if id(p) in own and digest_of(p) == was]
    lost = [p for p, _ in wanted if id(p) not in own and p.grad is not None and bool(p.grad.any())]
    still = [(p, was) for p, was in alive if not p.requires_grad and id(p) in frozen_first]
    frozen = [p for p, was in still if id(p) in own and digest_of(p) != was]
    for parameters, what in (
        (frozen, "are frozen, and their optimizer changes them"),
        (unmoved, "never change"),
        (lost, "get gradients, and no optimizer has them"),
    ):
        if parameters:
            some = ", ".join(names.get(id(parameter), "unnamed") for parameter in parameters[:_SHOWN])
            yield f"{len(parameters)} parameters {what}: {some}"
    after = statistics(roots)
    moved = [layer for layer, was in before.items() if after.get(layer, was) != was]
    if moved:
        yield f"the statistics of {len(moved)} frozen layers change: they need eval mode"
