"""What one run shows by itself: parameters that nobody trains, gradients that stay, statistics of frozen layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lit_cifar.checks.relations.parts import TrainedParts
from lit_cifar.checks.relations.plan import Trace
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
    changes: bool = False  # a step has changed a parameter
    rates: set[float] = field(default_factory=set)  # learning rates of the steps before the first that did
    backwards: int = 0


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


def nothing_changes(trace: Trace) -> Verdict | None:
    """What is said of a run that changes no parameter, or whose steps were not seen."""
    seen, steps = trace.part(Observed), len(trace.norms)
    if trace.norms and (trace.moved or seen.changes):
        return None
    if trace.norms:
        is_still = seen.rates == {0.0}
        why = "their learning rate is 0" if is_still else "no gradient reaches what the optimizers have"
        begins = is_still and trace.cuts and any(name.startswith("schedule/") for name in trace.state)
        remedy = "; pass a higher --steps, if its schedule begins so" if begins else ""
        return Verdict("run", "abstain" if begins else "fail", f"no parameter changes in {steps} steps: {why}{remedy}")
    if not seen.backwards:
        return Verdict("run", "abstain", "no step of an optimizer was seen: does the script train when it is run?")
    if not trace.first:
        text = "tensors of no torch.nn.Module are trained without an optimizer: give them to one, such as SGD"
    elif trace.moved:
        text = "parameters change, but not in a step of the optimizers that the script has"
    else:
        text = f"no parameter changes in {seen.backwards} backward passes: no optimizer makes a step"
    return Verdict("run", "abstain" if not trace.first or trace.moved else "fail", text)


class Observer:
    """Follows the parameters and optimizers of a process."""

    def __init__(self, trace: Trace, parts: TrainedParts) -> None:
        self._trace, self._parts, self._observed = trace, parts, trace.part(Observed)
        # When the training began: digests of the statistics of frozen layers, and frozen parameters.
        self._statistics: dict[int, tuple[int, ...]] = {}
        self._frozen: set[int] = set()
        # Of optimizers whose gradients no backward has found to be 0 since their step: whether one has added to them.
        # Of parameters, when a step was last looked at.
        self._digests: list[int] = []
        self._is_behind_backward = False
        self._is_stale = WeakKeyDictionary[Optimizer, bool]()

    def begins(self) -> None:
        """Note what the training begins with."""
        made = self._parts.made
        self._trace.first = self._digests = [digest_of(parameter) for parameter in made]
        self._statistics = _statistics(self._parts.roots)
        self._frozen = {id(p) for p in made if p is not None and not p.requires_grad}

    def follow_backward(self, backward: Any, *args: Any, **settings: Any) -> None:
        for optimizer in self._parts.optimizers:
            if optimizer in self._is_stale:
                gradients = (p.grad for p in owned_by([optimizer]) if p.grad is not None)
                if any(bool(gradient.any()) for gradient in gradients):
                    self._is_stale[optimizer] = True
                else:
                    del self._is_stale[optimizer]
        backward(*args, **settings)

    def moved_by_hand(self) -> bool:
        """Whether parameters have changed after a backward pass, without an optimizer, since this was asked last."""
        if self._parts.optimizers or not self._trace.first or not self._is_behind_backward:
            return False
        before, self._digests = self._digests, [digest_of(parameter) for parameter in self._parts.made]
        self._is_behind_backward = self._digests == before
        self._observed.changes |= not self._is_behind_backward
        return not self._is_behind_backward

    def note_backward(self, own: Any, *args: Any, **settings: Any) -> Any:
        self._is_behind_backward = True
        self._observed.backwards += 1
        return own(*args, **settings)

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._observed.changes:
            self._digests = [digest_of(parameter) for parameter in owned_by([optimizer])]

    def follow_step(self, optimizer: Optimizer) -> None:
        if not self._observed.changes:
            self._observed.changes = self._digests != [digest_of(parameter) for parameter in owned_by([optimizer])]
            self._observed.rates |= {float(group.get("lr", 1.0)) for group in optimizer.param_groups}
        self._observed.stale += self._is_stale.get(optimizer, False)
        self._is_stale[optimizer] = False

    def finish(self) -> None:
        made = zip(self._parts.made, self._trace.first, strict=False)
        self._trace.moved = sum(digest_of(parameter) != was for parameter, was in made)
        self._observed.owned = len(owned_by(self._parts.optimizers) or self._parts.made)
        self._observed.mistakes = [*self._mistakes()]

    def _mistakes(self) -> Iterator[str]:
        """In words, what does not change, or changes though it is frozen. What is frozen in some steps only may."""
        own = {id(parameter) for parameter in owned_by(self._parts.optimizers) or self._parts.made}
        made = zip(self._parts.made, self._trace.first, strict=False)
        alive = [(parameter, was) for parameter, was in made if parameter is not None and was]
        wanted = [(parameter, was) for parameter, was in alive if parameter.requires_grad]
        unmoved = [p for p, was in wanted if id(p) in own and digest_of(p) == was]
        lost = [p for p, _ in wanted if id(p) not in own and p.grad is not None and bool(p.grad.any())]
        still = [(p, was) for p, was in alive if not p.requires_grad and id(p) in self._frozen]
        changed = [p for p, was in still if id(p) in own and digest_of(p) != was]
        roots = self._parts.roots
        names = {id(parameter): name for root in roots for name, parameter in root.named_parameters()}
        for parameters, what in (
            (changed, "are frozen, and their optimizer changes them"),
            (unmoved, "never change"),
            (lost, "get gradients, and no optimizer has them"),
        ):
            if parameters:
                some = ", ".join(names.get(id(parameter), "unnamed") for parameter in parameters[:_SHOWN])
                yield f"{len(parameters)} parameters {what}: {some}"
        after = _statistics(roots)
        moved = [layer for layer, was in self._statistics.items() if after.get(layer, was) != was]
        if moved:
            yield f"the statistics of {len(moved)} frozen layers change: they need eval mode"


def owned_by(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def digest_of(tensor: Tensor | None) -> int:
    """A digest; 0 of what this process does not hold."""
    return 0 if tensor is None or tensor.is_meta or is_lazy(tensor) else digest(tensor)


def _statistics(roots: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """Digests of the buffers of each frozen layer that has parameters of its own, by its identity."""
    layers = (layer for root in roots for layer in root.modules())
    return {id(layer): tuple(map(digest_of, layer.buffers(recurse=False))) for layer in layers if _is_frozen(layer)}


def _is_frozen(layer: nn.Module) -> bool:
    own = [*layer.parameters(recurse=False)]
    return bool(own) and not any(parameter.requires_grad for parameter in own)
