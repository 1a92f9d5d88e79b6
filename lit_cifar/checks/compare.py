"""The difference of two states, tensors and numbers by name, and of what several ranks hold."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_cifar.checks.tensors import as_real

_TINY = 1e-12  # values as small as this are nothing


@dataclass(frozen=True)
class Difference:
    """A tensor or number that is not the same in two states. A value is None where only the other state has one."""

    name: Any  # a string, or what `str` makes one of
    size: float  # as `difference` measures it
    one: Any
    other: Any

    def __str__(self) -> str:
        if self.one is None or self.other is None:
            return f"{self.name} is only in one"
        if math.isinf(self.size):
            return f"{self.name} has another shape, or is not finite"
        if isinstance(self.one, float | int) and isinstance(self.other, float | int):
            return f"{self.name} is {self.one:.9g} in one and {self.other:.9g} in the other"
        return f"{self.name} differs by {self.size:.2g} of its largest value"


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], *, names: Iterable[str] | None = None, limit: float = 0.0
) -> list[Difference]:
    """Compare what has these names, all by default; return what differs by more than the limit, the largest first."""
    names = {**one, **other} if names is None else names
    pairs = ((name, one.get(name), other.get(name)) for name in names)
    found = [Difference(name, difference(a, b), a, b) for name, a, b in pairs]
    return sorted((each for each in found if each.size > limit), key=lambda each: -each.size)


def difference(one: Any, other: Any, *, least_scale: float = 0.0, equal_nan: bool = True) -> float:
    """Largest difference of two tensors or numbers, relative to the largest value of both, or to `least_scale`.

    It is infinite where only one is there, for unlike shapes, and where one has an infinite value, or NaN, that the
    other has not. Without `equal_nan` it is infinite for any NaN.
    """
    if one is None or other is None:
        return math.inf
    if isinstance(one, int) and isinstance(other, int):  # such as digests, which float64 would round
        return abs(one - other) / max(abs(one), abs(other), least_scale) if one != other else 0.0
    first, second = (_in_double(value) for value in (one, other))
    if first.shape != second.shape:
        return math.inf
    if torch.equal(first, second):
        return 0.0
    finite = first.isfinite() & second.isfinite()
    if not finite.all():
        if not torch.allclose(first[~finite], second[~finite], rtol=0.0, atol=0.0, equal_nan=equal_nan):
            return math.inf
        first, second = first[finite], second[finite]
    if not first.numel():
        return 0.0
    largest = max(float(first.abs().max()), float(second.abs().max()), least_scale)
    return float((first - second).abs().max()) / largest if largest > _TINY else 0.0


@dataclass(frozen=True)
class Disagreement:
    """A tensor that is not the same on all ranks that hold it."""

    name: str
    ranks: tuple[int, ...]  # ranks that differ from the majority; all ranks, if there is none
    num_others: int  # size of the majority; 0 if there is none

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        if not self.num_others:
            return f"{self.name}: {ranks} differ, and there is no majority"
        return f"{self.name}: {ranks} differ{'s' * (len(self.ranks) == 1)} from the {self.num_others} others"


def disagreement(name: str, of_ranks: Mapping[int, Hashable]) -> Disagreement | None:
    """Compare digests by rank. Nobody can say which of two ranks is right."""
    (common, number), *others = Counter(of_ranks.values()).most_common()
    if not others:
        return None
    has_majority = 2 * number > len(of_ranks)
    ranks = (rank for rank, value in of_ranks.items() if not has_majority or value != common)
    return Disagreement(name, tuple(ranks), number if has_majority else 0)


def _in_double(value: Any) -> Tensor:
    if not isinstance(value, Tensor):  # `as_tensor` would round a number to torch's default dtype
        return torch.tensor(value, dtype=torch.float64)
    return as_real(value.detach()).double()
