"""What a run turns on or off in torch: precision, compilation, recomputation, the scale of the loss, groups, seeds."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils import checkpoint

from lit_cifar.checks.relations.generators import ROUNDED
from lit_cifar.checks.relations.patching import patched
from lit_cifar.checks.relations.plan import Plan, Trace
from lit_cifar.checks.repeated_step.batches import Samples
from lit_cifar.internals import tree_map


def turn(plan: Plan, trace: Trace, keep_scaler: Callable[[GradScaler], None]) -> None:
    """Do as the plan says, and note in the trace what the script has."""
    patched(torch, "compile", partial(_compiler, plan, trace))
    patched(nn.Module, "compile", partial(_compiler, plan, trace))
    patched(checkpoint, "checkpoint", partial(_recomputer, plan, trace))
    patched(GradScaler, "__init__", partial(_scaler, plan, trace, keep_scaler))
    patched(torch.autocast, "__init__", partial(_autocast, plan, trace))
    if plan.regroup:
        patched(Optimizer, "__init__", _regrouped)
    if plan.double:
        compute_in_double(trace.remarks.add)
    if plan.seed:
        patched(torch, "manual_seed", lambda seed: lambda number: seed(int(number) + plan.seed))


def _compiler(plan: Plan, trace: Trace, own: Any) -> Callable[..., Any]:
    def compiled(function: Any = None, *args: Any, **settings: Any) -> Any:
        trace.compiles = True
        if plan.compiled:
            return own(function, *args, **settings)
        return function if function is not None else lambda decorated: decorated

    return compiled


def _recomputer(plan: Plan, trace: Trace, recompute: Any) -> Callable[..., Any]:
    own = inspect.signature(recompute).parameters

    def checkpointed(function: Any, *args: Any, **settings: Any) -> Any:
        trace.recomputes = True
        if not plan.keep_activations:
            return recompute(function, *args, **settings)
        return function(*args, **{name: value for name, value in settings.items() if name not in own})

    return checkpointed


def _scaler(plan: Plan, trace: Trace, keep: Callable[[GradScaler], None], make: Any) -> Callable[..., None]:
    def made(scaler: GradScaler, device: str = "cuda", init_scale: float = 2.0**16, *args: Any, **own: Any) -> None:
        make(scaler, "cpu", init_scale * plan.scale, *args, **own)
        trace.scales |= scaler.is_enabled()
        keep(scaler)

    return made


def _autocast(plan: Plan, trace: Trace, make: Any) -> Callable[..., None]:
    def made(own: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        trace.autocasts |= enabled
        make(own, "cpu", dtype, enabled and plan.autocast, cache_enabled)

    return made


def _regrouped(make: Any) -> Callable[..., None]:
    """Groups in reverse order; the parameters of a single one."""

    def made(optimizer: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        params = [*params][::-1]
        if len(params) == 1 and isinstance(params[0], dict):
            params = [params[0] | {"params": [*params[0]["params"]][::-1]}]
        make(optimizer, params, defaults)

    return made


def compute_in_double(remark: Callable[[str], None]) -> None:
    """New tensors are float64, and what a script asks to be float32 by `.float()`."""
    for name in ("to", "bfloat16", "half"):
        patched(torch.Tensor, name, partial(_remarking, remark))
    torch.set_default_dtype(torch.float64)
    patched(GradScaler, "unscale_", partial(_with, torch.Tensor, "float", torch.Tensor.float))  # torch's own wants it
    for owner in (torch.Tensor, torch.nn.Module):
        patched(owner, "float", _double)


def in_double(tree: Any) -> Any:
    """Inputs of the type of the weights, where a script asks for float32 by name."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Samples):
            return type(leaf)(in_double([*leaf]))
        is_single = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
        return leaf.double() if is_single else leaf

    return tree_map(cast, tree)


def _with(owner: Any, name: str, value: Any, function: Any) -> Callable[..., Any]:
    def called(*args: Any, **settings: Any) -> Any:
        with mock.patch.object(owner, name, value):
            return function(*args, **settings)

    return called


def _double(_: Any) -> Callable[..., Any]:
    return lambda own, *args, **settings: own.double(*args, **settings)


def _remarking(remark: Callable[[str], None], convert: Any) -> Callable[..., torch.Tensor]:
    def converted(*args: Any, **settings: Any) -> torch.Tensor:
        found: torch.Tensor = convert(*args, **settings)
        if found.dtype in (torch.bfloat16, torch.float16):
            remark(ROUNDED)
        return found

    return converted
