"""What one run shows by itself: parameters that nobody trains, gradients that stay, statistics of frozen layers."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lit_cifar.checks.relations.interruption import Checkpoints
from lit_cifar.checks.relations.parts import TrainedParts
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import NotJudgedError, Runs
from lit_cifar.checks.tensors import digest
from lit_cifar.checks.verdict import Verdict
from lit_cifar.errors import printable

NAME = "what is trained"
_SHOWN, _LONGEST = 3, 120  # names, and characters of what was printed
_STEPS_TO_TELL = 2


@dataclass
class Observed:
    """What a process writes down."""

    mistakes: list[str] = field(default_factory=list)  # in words, what looks like one
    in_eval: int = 0  # steps in eval mode, after others in train mode
    stale: int = 0  # steps that began with gradients of the step before
    owned: int = 0  # parameters of optimizers
    changes: bool = False  # parameters of an optimizer have another norm after a later step
    rates: set[float] = field(default_factory=set)  # learning rates of all steps
    backwards: int = 0


def trained(runs: Runs) -> Iterator[Verdict]:
    own = runs.own()
    if not own.moved:
        raise NotJudgedError("its parameters end as they began, or optimizers have others, as FSDP2 gives them")
    seen = own.part(Observed)
    found = [*seen.mistakes]
    if seen.stale >= _STEPS_TO_TELL:
        found.append(f"gradients of the step before are added in {seen.stale} of {own.steps} steps: call zero_grad()")
    if seen.in_eval >= _STEPS_TO_TELL:
        found.append(f"{seen.in_eval} of {own.steps} steps are in eval mode, after others in train mode: call train()")
    yield from (Verdict(NAME, "note", text) for text in found)
    if not found:
        yield Verdict(NAME, "pass", looked_at=f"each of {seen.owned} parameters changes")


def nothing_changes(trace: Trace) -> str:
    """What is said of a run that changes no parameter. Raise a `NotJudgedError` if it may, where it was not seen."""
    seen, steps = trace.part(Observed), len(trace.norms)
    if steps and (trace.moved or seen.changes):
        return ""
    if steps and seen.rates != {0.0}:
        return f"no parameter changes in {steps} steps: no gradient reaches what the optimizers have"
    if steps:
        text = f"no parameter changes in {steps} steps: their learning rate is 0"
        if trace.cuts and any(name.startswith("schedule/") for name in trace.state):
            raise NotJudgedError(f"{text}; pass a higher --steps, if its schedule begins so")
        return text
    if not seen.backwards:
        words = f" It ends with: {printable(trace.end.words)[-_LONGEST:]}" if trace.end.words else ""
        earlier = trace.part(Checkpoints).say_earlier()
        raise NotJudgedError(f"no step of an optimizer was seen{earlier}: does the script train when it is run?{words}")
    if not trace.first:
        raise NotJudgedError("it trains tensors of no torch.nn.Module without an optimizer: give them to one")
    if trace.moved:
        raise NotJudgedError("parameters change, but not in a step of the optimizers that the script has")
    return f"no parameter changes in {seen.backwards} backward passes: no optimizer makes a step"


class Observer:
    """Follows the parameters and optimizers of a process."""

    def __init__(self, trace: Trace, parts: TrainedParts) -> None:
        self._trace, self._parts, self._observed = trace, parts, trace.part(Observed)
        # When the training began: digests of the statistics of frozen layers, and frozen parameters.
        self._statistics: dict[int, tuple[int, ...]] = {}
        self._frozen: set[int] = set()
        self._digests: list[int] = []  # of parameters, when it was last asked whether they were moved by hand
        self._is_behind_backward = self._has_train_mode = False
        # Of optimizers whose gradients no backward has found to be 0 since their step: whether one has added to them.
        self._is_stale = WeakKeyDictionary[Optimizer, bool]()
        self._norms = WeakKeyDictionary[Optimizer, float]()  # of their parameters, after their first step

    def begins(self) -> None:
        """Note what the training begins with."""
        made = self._parts.made
        self._trace.first = self._digests = [digest_of(parameter) for parameter in made]
        self._statistics = _statistics(self._parts.roots)
        self._frozen = {id(p) for p in made if p is not None and not p.requires_grad}

    def follow_backward(self, *_: Any, **__: Any) -> None:
        for optimizer in [*self._is_stale]:
            if any(bool(p.grad.any()) for p in owned_by([optimizer]) if p.grad is not None):
                self._is_stale[optimizer] = True
            else:
                del self._is_stale[optimizer]

    def moved_by_hand(self) -> bool:
        """Whether parameters have changed after a backward pass, without an optimizer, since this was asked last."""
        if self._parts.optimizers or not self._trace.first or not self._is_behind_backward:
            return False
        before, self._digests = self._digests, [digest_of(parameter) for parameter in self._parts.made]
        self._is_behind_backward = self._digests == before
        return not self._is_behind_backward

    def note_backward(self, *_: Any, **__: Any) -> None:
        self._is_behind_backward = True
        self._observed.backwards += 1

    def follow_step(self, optimizer: Optimizer, norm: float) -> None:
        if optimizer not in self._norms:  # perhaps it takes the place of another
            self._parts.forget_given_up()
        self._observed.changes |= norm != self._norms.setdefault(optimizer, norm)
        self._observed.rates |= {float(group.get("lr", 1.0)) for group in optimizer.param_groups}
        is_training = any(root.training for root in self._parts.roots)
        self._has_train_mode |= is_training
        self._observed.in_eval += self._has_train_mode and not is_training
        self._observed.stale += self._is_stale.get(optimizer, False)
        self._is_stale[optimizer] = False

    def finish(self) -> None:
        owned = owned_by(self._parts.optimizers) or self._parts.made
        made = [*zip(self._parts.made, self._trace.first, strict=False)]
        self._trace.moved = sum(digest_of(parameter) != was for parameter, was in made)
        self._observed.owned = len(owned)
        self._observed.mistakes = [*self._mistakes(made, {*map(id, owned)})]

    def _mistakes(self, made: Sequence[tuple[Tensor | None, int]], owned: Container[int]) -> Iterator[str]:
        """In words, what does not change, or changes though it is frozen. What is frozen in some steps only may."""
        names = {id(parameter): name for root in self._parts.roots for name, parameter in root.named_parameters()}
        found: dict[str, list[str]] = {}
        for parameter, was in made:
            if parameter is None or not was:
                continue
            place = id(parameter)
            has_changed = digest_of(parameter) != was
            if not parameter.requires_grad:
                is_still = place in self._frozen and place in owned
                what = "are frozen, and their optimizer changes them" if is_still and has_changed else ""
            elif place in owned:
                may_follow = self._trace.end.at_limit and place not in names  # as the models of later folds
                what = "" if has_changed or may_follow else "never change"
            else:
                has_gradient = parameter.grad is not None and bool(parameter.grad.any())
                what = "get gradients, and no optimizer has them" if has_gradient and not has_changed else ""
            found.setdefault(what, []).append(names.get(place, "unnamed"))
        found.pop("", None)
        yield from (f"{len(own)} parameters {what}: {', '.join(own[:_SHOWN])}" for what, own in found.items())
        after = _statistics(self._parts.roots)
        if moved := [layer for layer, was in self._statistics.items() if after.get(layer, was) != was]:
            yield f"the statistics of {len(moved)} frozen layers change: they need eval mode"


def owned_by(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def digest_of(tensor: Tensor | None) -> int:
    """A digest; 0 of what this process does not hold."""
    return 0 if tensor is None or tensor.is_meta or is_lazy(tensor) else digest(tensor)


def _statistics(roots: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """Digests of the buffers of each frozen layer that has parameters of its own, by its identity."""
    found = {}
    for layer in (layer for root in roots for layer in root.modules()):
        if (own := [*layer.parameters(recurse=False)]) and not any(parameter.requires_grad for parameter in own):
            found[id(layer)] = tuple(map(digest_of, layer.buffers(recurse=False)))
    return found
