"""What a run turns on or off in torch: CUDA, precision, compilation, the scale of the loss, seeds."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from lit_cifar.checks.relations.batches import Samples
from lit_cifar.checks.relations.options import ScaleLoss
from lit_cifar.checks.relations.patching import patched
from lit_cifar.checks.relations.plan import End, RunPlan, Script, Trace
from lit_cifar.checks.relations.remarks import ROUNDED
from lit_cifar.internals import tree_map

_CPU = torch.device("cpu")
_IDLE = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")


def set_switches(plan: RunPlan, trace: Trace) -> None:
    """Do as the plan says, and note in the trace what the script has."""
    scale = plan.asked(ScaleLoss)
    on_cpu = not plan.on_own_devices
    patched(GradScaler, "__init__", partial(_make_scaler, trace.script, scale.factor if scale else 1.0, on_cpu))
    if plan.seed:
        patched(torch, "manual_seed", lambda manual_seed, seed: manual_seed(int(seed) + plan.seed))
    if plan.on_own_devices:
        return
    _note_cuda(trace.end)
    if plan.without_gpu:
        _stay_on_cpu(plan.ranks)
    patched(torch, "compile", _leave_eager)
    patched(nn.Module, "compile", _leave_eager)
    patched(torch.autocast, "__init__", _make_without_effect)
    if plan.double:
        _compute_in_double(trace.remarks.add)


def _make_scaler(
    script: Script,
    factor: float,
    on_cpu: bool,
    make: Any,
    scaler: GradScaler,
    device: str = "cuda",
    init_scale: float = 2.0**16,
    *args: Any,
    **own: Any,
) -> None:
    make(scaler, "cpu" if on_cpu else device, init_scale * factor, *args, **own)
    script.scales_loss |= scaler.is_enabled()


def _leave_eager(own: Any, *args: Any, **settings: Any) -> Any:
    torch.compiler.set_stance("force_eager")  # torch's own wrapper then runs what was written
    return own(*args, **settings)


def _make_without_effect(
    make: Any, autocast: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
) -> None:
    make(autocast, "cpu", dtype, False, cache_enabled)


def _compute_in_double(remark: Callable[[str], None]) -> None:
    """New tensors are float64, and what a script asks to be float32 by `.float()`."""
    for name in ("to", "bfloat16", "half"):
        patched(torch.Tensor, name, partial(_converted, remark))
    torch.set_default_dtype(torch.float64)
    patched(GradScaler, "unscale_", partial(_with, torch.Tensor, "float", torch.Tensor.float))  # torch's own wants it
    for owner in (torch.Tensor, torch.nn.Module):
        patched(owner, "float", lambda _, own, *args, **settings: own.double(*args, **settings))


def in_double(tree: Any) -> Any:
    """Inputs of the type of the weights, where a script asks for float32 by name."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Samples):
            return type(leaf)(in_double([*leaf]))
        is_single = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
        return leaf.double() if is_single else leaf

    return tree_map(cast, tree)


def _with(owner: Any, name: str, value: Any, function: Any, *args: Any, **settings: Any) -> Any:
    with mock.patch.object(owner, name, value):
        return function(*args, **settings)


def _converted(remark: Callable[[str], None], convert: Any, *args: Any, **settings: Any) -> Any:
    found = convert(*args, **settings)
    if found.dtype in (torch.bfloat16, torch.float16):
        remark(ROUNDED)
    return found


class _OnCpu(TorchFunctionMode):
    """Gives torch's functions the CPU wherever a script gives them a CUDA device, by its name or its number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.device:
            return _here(func(*args, **(kwargs or {})))
        if func is torch.Tensor.to:
            args = tuple(_CPU if type(value) is int else value for value in args)
        named = {name: _here(value) for name, value in (kwargs or {}).items()}
        if type(named.get("device")) is int:
            named["device"] = _CPU
        return func(*map(_here, args), **named)


def _here(value: Any) -> Any:
    is_name = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return _CPU if is_name or (isinstance(value, torch.device) and value.type == "cuda") else value


def _note_cuda(end: End) -> None:
    """Note that the script names CUDA, or asks whether it is there."""

    def asked(own: Any, *args: Any, **settings: Any) -> Any:
        end.wants_cuda = True
        return own(*args, **settings)

    for name in ("is_available", "device_count", "set_device", "_lazy_init"):
        patched(torch.cuda, name, asked)


def _stay_on_cpu(ranks: int) -> None:
    """Let a device of CUDA be there for each rank, which is the CPU."""
    ExitStack().enter_context(_OnCpu())  # up to the end of the process
    answers: dict[str, Any] = {"is_available": True, "device_count": ranks, "current_device": 0, "memory_allocated": 0}
    answers |= dict.fromkeys(_IDLE) | {"max_memory_allocated": 0, "get_device_name": "the CPU"}
    for name, answer in answers.items():
        patched(torch.cuda, name, partial(_answer, answer))
    patched(torch, "load", lambda load, f, *_, **own: load(f, **own | {"map_location": "cpu"}))
    patched(DistributedDataParallel, "__init__", _make_without_devices)
    patched(torch.distributed, "barrier", lambda wait, *args, **_: wait(*args))


def _answer(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


def _make_without_devices(
    make: Any, own: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **settings: Any
) -> None:
    make(own, module, None, None, *args, **settings)
