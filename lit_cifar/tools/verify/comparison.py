"""How far two traces of a training are apart, and how far they may be: pure functions of recorded steps.

A *step* has the whole tensors after one optimizer step, by kind and name. Optimizer state is named after the
parameters.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Step: TypeAlias = Mapping[str, Mapping[str, Tensor]]
Bounds: TypeAlias = dict[str, float]

KINDS = ("loss", "parameters", "buffers", "optimizer")
LOGITS = "logits"  # the kind that is compared after an evaluation

# With virtual replicas every bit is the same. A process has the losses of its own parts alone: they are left out.
SAME_BITS = {"parameters": 0.0, "buffers": 0.0, "optimizer": 0.0}
EXACT_BOUND = 1e-9  # what every kind must agree to in float64, where rounding is far below any mistake
METRIC_BOUND = 1e-5  # metrics add up in float32, whatever the precision of the run is
NOISE_FACTOR = 4.0  # how many times the measured effect of another order of summation a mode may differ by
# The smallest tolerance, in units of the last place of 1.0: for values that another order did not change at all.
FLOOR_ULP = 4.0


@dataclass(frozen=True)
class Excess:
    """A step's first difference beyond its tolerance, as `first_excess` orders them, and how many more there are."""

    step: int
    kind: str
    name: str
    difference: float
    bound: float
    more: int = 0

    def __str__(self) -> str:
        gap = f"differs by {self.difference:.1e}, allowed {self.bound:.1e}"
        if math.isinf(self.difference):
            gap = "is missing, not a number or of another shape"
        return f"step {self.step}: {self.name} {gap} ({self.kind})" + and_more(self.more)


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest |found - expected| over max(1, largest |expected|); infinite for another shape or anything not finite."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    dtype = torch.promote_types(torch.promote_types(found.dtype, expected.dtype), torch.float32)
    a, b = found.detach().to("cpu", dtype), expected.detach().to("cpu", dtype)
    gap = _largest_size(a - b) / max(1.0, _largest_size(b))
    return gap if math.isfinite(gap) else math.inf


def _largest_size(tensor: Tensor) -> float:
    """NaN if any element is; `abs().max()` would make a copy."""
    return max(abs(float(extreme)) for extreme in torch.aminmax(tensor))


def differences(found: Step, expected: Step) -> dict[str, dict[str, float]]:
    """The difference of every tensor by kind and name, in the order of `expected`; infinite where one side has none."""
    return {
        kind: {
            name: difference(found[kind][name], expected[kind][name])
            if name in found[kind] and name in expected[kind]
            else math.inf
            for name in [*expected[kind], *(name for name in found[kind] if name not in expected[kind])]
        }
        for kind in KINDS
        if kind in expected
    }


def and_more(count: int) -> str:
    return f", and {count} more" if count else ""


def largest(of_step: Mapping[str, Mapping[str, float]]) -> Bounds:
    return {kind: max(values.values(), default=0.0) for kind, values in of_step.items()}


def measured_bounds(noise: Sequence[Sequence[Bounds]], *, eps: float) -> list[Bounds]:
    """What each kind may differ by after each step, from the `noise` of reference runs that added in another order.

    It is `NOISE_FACTOR` times the largest difference of any such run in this or an earlier step, and at least
    `FLOOR_ULP` times `eps`: what is rounded in one step is amplified in the next, and by chance may come back. A
    network may have no buffers.
    """
    bounds: list[Bounds] = []
    worst = dict.fromkeys(KINDS, FLOOR_ULP * eps)
    for runs in zip(*noise, strict=True):
        worst = {kind: max(worst[kind], *(NOISE_FACTOR * run.get(kind, 0.0) for run in runs)) for kind in KINDS}
        bounds.append(dict(worst))
    return bounds


def first_excess(of_step: Mapping[str, Mapping[str, float]], bounds: Bounds, *, step: int) -> Excess | None:
    """The first tensor beyond its bound: the loss, then in the order of the network, buffers before parameters.

    A layer's buffers come from its forward pass alone. Parameters and optimizer state of the whole network move as
    soon as one gradient is wrong, so they say less about where a mistake is. Kinds without a bound are left out.
    """
    found = [
        (kind, name, value)
        for kind in ("loss", "buffers", "parameters", "optimizer")
        for name, value in of_step.get(kind, {}).items()
        if value > bounds.get(kind, math.inf)
    ]
    return Excess(step, *found[0], bounds[found[0][0]], more=len(found) - 1) if found else None


def sample_problems(found: Sequence[Sequence[int]], expected: Sequence[int]) -> list[str]:
    """Phrases for the ids that are missing, seen too often or foreign, of those that the processes of a step read.

    `found` has the ids of every data-parallel rank, `expected` those of the reference, in any order.
    """
    seen, wanted = Counter(i for of_rank in found for i in of_rank), Counter(expected)
    missing, surplus = sorted((wanted - seen).elements()), sorted((seen - wanted).elements())
    problems = []
    if missing:
        problems.append(f"{len(missing)} samples are missing, e.g. {missing[0]}")
    if surplus:
        problems.append(f"{len(surplus)} samples are unknown or used too often, e.g. {surplus[0]}")
    return problems
