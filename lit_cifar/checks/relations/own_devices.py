"""A training on the devices that its script uses, in its own precision: what rounding alone changes there.

Equal runs differ by rounding, which grows from step to step. It grows by the same factors in two runs that must train
the same model, and in one whose weights and gradients are changed by a last digit in each step. So the largest
difference of such equal runs is the measure of a pair. Where a mistake could hide in it, nothing is said.
"""

import os
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lit_cifar.checks.compare import difference
from lit_cifar.checks.relations.patching import after, patched
from lit_cifar.checks.relations.plan import RunPlan, Trace
from lit_cifar.checks.relations.runs import LARGEST, NotJudgedError, Runs
from lit_cifar.checks.relations.told import results
from lit_cifar.checks.relations.trained import owned_by

ROUND_OTHERWISE = "round otherwise"  # asks a run to change the last digit of some weights and gradients in each step


@dataclass
class OwnDevices:
    """What a process writes down."""

    names: set[str] = field(default_factory=set)  # such as "cuda:0", where parameters are
    digit: float = 0.0  # the last digit of a 1 in the coarsest type that it computes in


def share_device(ranks: int) -> bool:
    """Whether ranks have to share GPUs."""
    return torch.cuda.is_available() and torch.cuda.device_count() < ranks


def follow_devices(plan: RunPlan, trace: Trace) -> None:
    """Note devices and types of the training. Ranks that have to share a device have it on nodes of their own."""
    seen = trace.part(OwnDevices)
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    if share_device(plan.ranks):
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": os.environ.get("RANK", "0")}

    def note_type(autocast: torch.autocast) -> None:
        if torch.is_autocast_enabled(autocast.device):
            seen.digit = max(seen.digit, torch.finfo(torch.get_autocast_dtype(autocast.device)).eps)

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        for parameter in owned_by([optimizer]):
            seen.names.add(str(parameter.device))
            seen.digit = max(seen.digit, torch.finfo(parameter.dtype).eps)
            if plan.asks == ROUND_OTHERWISE:
                _round_otherwise(parameter, 0.0, trace.steps)
                if parameter.grad is not None:
                    usual = float(parameter.grad.norm()) / parameter.numel() ** 0.5
                    _round_otherwise(parameter.grad, seen.digit, trace.steps, usual=usual)

    patched(torch.autocast, "__enter__", after(note_type))
    register_optimizer_step_pre_hook(before_step)


@torch.no_grad()
def _round_otherwise(tensor: Tensor, digit: float, step: int, *, usual: float = 0.0) -> None:
    """Change two thirds of its values by their last digit, and by that of a `usual` value of sums that cancel out."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    generator = torch.Generator(local.device).manual_seed(step)
    signs = torch.randint(-1, 2, local.shape, generator=generator, device=local.device).to(local.dtype)
    local.add_(signs * (local.abs() + usual) * max(digit, torch.finfo(local.dtype).eps))


def measure(runs: Runs) -> str:
    """Let `runs` know how far equal runs differ, and say it. Raise a `NotJudgedError` if a mistake could hide in it."""
    equal = [runs.own(), runs.own(repetition=1), runs.own(asks=ROUND_OTHERWISE)]
    seen = equal[0].part(OwnDevices)
    states: list[dict[Any, Any]] = [{**of.state, **results(of)} for of in equal]
    for one, other in combinations(states, 2):
        for name in one.keys() & other.keys():
            runs.spread[name] = max(runs.spread.get(name, 0.0), difference(one[name], other[name]))
    runs.digit = seen.digit
    weights = [name for name in equal[0].state if name.startswith("weights/")]
    kept = [runs.spread[name] for name in weights if runs.spread[name] <= LARGEST]
    lost = len(weights) - len(kept)
    if lost > len(kept):
        text = f"{lost} of {len(weights)} weights of equal runs differ by more than {LARGEST}, in which a mistake"
        raise NotJudgedError(f"{text} could hide: pass fewer --steps than {equal[0].steps}")
    of_equal = f"{max(kept, default=0.0):.1g}" + (f", {lost} that differ more are left out" if lost else "")
    return f"on {', '.join(sorted(seen.names))} in its own precision, where weights of equal runs differ by {of_equal}"


def of_trainer(plan: RunPlan, own: dict[str, Any]) -> dict[str, Any]:
    """Arguments of Lightning's Trainer for the script's own devices."""
    places = {"devices": 1, "num_nodes": plan.ranks} if share_device(plan.ranks) else {}
    return {"accelerator": own.get("accelerator", "auto"), **places}
