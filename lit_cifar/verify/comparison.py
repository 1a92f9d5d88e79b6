"""How far two traces of a training are apart, and how far they may be: pure functions of recorded steps.

A *step* is what `Trace` wrote after one optimizer step, under "loss", "state", "buffers" and "optimizer";
"buffers" are the names of those entries of "state" that are no parameters.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Step: TypeAlias = Mapping[str, Any]
Bounds: TypeAlias = dict[str, float]

KINDS = ("loss", "parameters", "buffers", "optimizer")

# With virtual replicas every bit is the same. A process has the losses of its own parts alone: they are left out.
SAME_BITS = {"parameters": 0.0, "buffers": 0.0, "optimizer": 0.0}
EXACT_BOUND = 1e-9  # what every kind must agree to in float64, where rounding is far below any mistake
NOISE_FACTOR = 4.0  # how many times the measured effect of another order of summation a mode may differ by
# The smallest tolerance, in units of the last place of 1.0: for values that another order did not change at all.
FLOOR_ULP = 4.0


@dataclass(frozen=True)
class Excess:
    """The first difference beyond its tolerance: in the first step, and there as `first_excess` orders them."""

    step: int
    kind: str
    name: str
    difference: float
    bound: float

    def __str__(self) -> str:
        if math.isinf(self.difference):
            return f"step {self.step}: {self.name} is missing, not a number or of another shape ({self.kind})"
        return f"step {self.step}: {self.name} differs by {self.difference:.1e}, allowed {self.bound:.1e} ({self.kind})"


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


def tensors(step: Step, *, like: Step) -> dict[str, dict[str, Tensor]]:
    """The tensors of `step` by kind and name, in the order of the network of `like`.

    Names that `like` does not have count as parameters. The optimizer's state is named after the parameters.
    """
    buffers = set(like["buffers"])
    state = step["state"]
    order = [*(name for name in like["state"] if name in state), *(name for name in state if name not in like["state"])]
    parameter_names = [name for name in like["state"] if name not in buffers]
    return {
        "loss": {"loss": torch.as_tensor(step["loss"])},
        "parameters": {name: state[name] for name in order if name not in buffers},
        "buffers": {name: state[name] for name in order if name in buffers},
        "optimizer": dict(_optimizer_tensors(step["optimizer"], parameter_names)),
    }


def _optimizer_tensors(state_dict: Mapping[str, Any], names: Sequence[str]) -> Iterable[tuple[str, Tensor]]:
    """Every number in an optimizer's state dict: per parameter, then per group (learning rate and so on)."""
    for index, values in sorted(state_dict["state"].items(), key=lambda item: str(item[0]).zfill(9)):
        name = names[index] if isinstance(index, int) and index < len(names) else str(index)
        for key, value in values.items():
            if isinstance(value, Tensor | float | int):
                yield f"{name}:{key}", torch.as_tensor(value)
    for number, group in enumerate(state_dict["param_groups"]):
        yield f"group {number}:params", torch.as_tensor([float(len(group["params"]))])
        for key, value in group.items():
            if isinstance(value, Tensor | float | int):
                yield f"group {number}:{key}", torch.as_tensor(value)


def differences(found: Step, expected: Step) -> dict[str, dict[str, float]]:
    """The difference of every tensor by kind and name; infinite where only one side has it."""
    a, b = tensors(found, like=expected), tensors(expected, like=expected)
    return {
        kind: {
            name: difference(a[kind][name], b[kind][name]) if name in a[kind] and name in b[kind] else math.inf
            for name in [*b[kind], *(name for name in a[kind] if name not in b[kind])]
        }
        for kind in KINDS
    }


def largest(of_step: Mapping[str, Mapping[str, float]]) -> Bounds:
    return {kind: max(of_step[kind].values(), default=0.0) for kind in KINDS}


def measured_bounds(noise: Sequence[Sequence[Bounds]], *, eps: float) -> list[Bounds]:
    """What each kind may differ by after each step, from the `noise` of reference runs that added in another order.

    It is `NOISE_FACTOR` times the largest difference of any such run in this or an earlier step, and at least
    `FLOOR_ULP` times `eps`: what is rounded in one step is amplified in the next, and by chance may come back.
    """
    bounds: list[Bounds] = []
    worst = dict.fromkeys(KINDS, FLOOR_ULP * eps)
    for runs in zip(*noise, strict=True):
        worst = {kind: max(worst[kind], *(NOISE_FACTOR * run[kind] for run in runs)) for kind in KINDS}
        bounds.append(dict(worst))
    return bounds


def first_excess(of_step: Mapping[str, Mapping[str, float]], bounds: Bounds, *, step: int) -> Excess | None:
    """The first tensor beyond its bound: the loss, then in the order of the network, buffers before parameters.

    A layer's buffers come from its forward pass alone. Parameters and optimizer state of the whole network move as
    soon as one gradient is wrong, so they say less about where a mistake is. Kinds without a bound are left out.
    """
    for kind in (kind for kind in ("loss", "buffers", "parameters", "optimizer") if kind in bounds):
        for name, value in of_step[kind].items():
            if value > bounds[kind]:
                return Excess(step, kind, name, value, bounds[kind])
    return None


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
