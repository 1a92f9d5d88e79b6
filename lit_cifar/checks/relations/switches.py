"""What a run turns on or off in torch: CUDA, precision, compilation, the scale of the loss, seeds."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from lit_cifar.checks.relations.batches import Samples
from lit_cifar.checks.relations.patching import before, patched
from lit_cifar.checks.relations.plan import RunPlan, Trace
from lit_cifar.checks.relations.remarks import ROUNDED
from lit_cifar.internals import tree_map

_CPU, _BYTES = torch.device("cpu"), 2**34  # in place of a GPU, and of its memory
_IDLE = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")
_EMPTY = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def set_switches(plan: RunPlan, trace: Trace) -> None:
    """Do as the plan says, and note in the trace what the script has."""

    def make_scaler(
        make: Any, scaler: Any, device: str = "cuda", init_scale: float = 2.0**16, *args: Any, **own: Any
    ) -> None:
        device = device if plan.on_own_devices else "cpu"
        make(scaler, device, dict(plan.knobs).get("loss_scale", init_scale), *args, **own)
        if scaler.is_enabled():
            trace.script.calls["loss_scale"] = init_scale

    patched(GradScaler, "__init__", make_scaler)
    if plan.seed:
        patched(torch, "manual_seed", lambda manual_seed, seed: manual_seed(int(seed) + plan.seed))
    if plan.on_own_devices:
        return
    for name in ("is_available", "device_count", "set_device", "_lazy_init"):
        patched(torch.cuda, name, before(lambda *_, **__: setattr(trace.end, "wants_cuda", True)))
    if plan.without_gpu:
        _stay_on_cpu(plan.ranks)
    # On the CPU neither it nor DistributedDataParallel takes it.
    patched(nn.SyncBatchNorm, "forward", lambda _, *args, **own: nn.BatchNorm1d.forward(*args, **own))
    patched(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None)
    for owner in (torch, nn.Module):  # torch's own wrapper then runs what was written
        patched(owner, "compile", before(lambda *_, **__: torch.compiler.set_stance("force_eager")))
    patched(torch.autocast, "__init__", lambda own, it, device_type, dtype=None, *_, **__: own(it, "cpu", dtype, False))
    if plan.double:
        _compute_in_double(trace.remarks)


def _compute_in_double(remarks: set[str]) -> None:
    """New tensors are float64, those of modules too that a script makes or loads as float32, and what it casts so."""
    own_float = torch.Tensor.float

    def convert(own: Any, tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
        if tensor.dtype == torch.float64:
            args, settings = tuple(map(_doubled, args)), {name: _doubled(value) for name, value in settings.items()}
        found = own(tensor, *args, **settings)
        if found.dtype in (torch.bfloat16, torch.float16):
            remarks.add(ROUNDED)
        return found

    def register(_module: nn.Module, _name: str, own: Any) -> None:
        if isinstance(own, torch.Tensor) and own.dtype == torch.float32:
            own.data = own.data.double()

    def unscale(own: Any, *args: Any) -> Any:
        with mock.patch.object(torch.Tensor, "float", own_float):  # torch's own wants it
            return own(*args)

    for name in ("to", "bfloat16", "half"):
        patched(torch.Tensor, name, convert)
    register_module_parameter_registration_hook(register)
    register_module_buffer_registration_hook(register)
    torch.set_default_dtype(torch.float64)
    patched(GradScaler, "unscale_", unscale)
    for kind in (torch.Tensor, nn.Module):
        patched(kind, "float", lambda _, own, *args, **settings: own.double(*args, **settings))


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def in_double(tree: Any) -> Any:
    """Inputs of the type of the weights, where a script asks for float32 by name."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Samples):
            return type(leaf)(in_double([*leaf]))
        is_single = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
        return leaf.double() if is_single else leaf

    return tree_map(cast, tree)


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


class _Idle:
    """A stream or an event of a GPU that is not there."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 1.0 if name == "elapsed_time" else None


def _stay_on_cpu(ranks: int) -> None:
    """Let a device of CUDA be there for each rank, which is the CPU."""
    ExitStack().enter_context(_OnCpu())  # up to the end of the process
    answers: dict[str, Any] = {"is_available": True, "device_count": ranks, "get_device_name": "the CPU"}
    answers |= dict.fromkeys(_IDLE) | dict.fromkeys(_EMPTY, 0)
    answers |= dict.fromkeys(("Event", "Stream", "current_stream"), _Idle()) | {"stream": nullcontext()}
    answers |= {"is_bf16_supported": True, "get_device_capability": (8, 0), "mem_get_info": (_BYTES, _BYTES)}
    answers["get_device_properties"] = SimpleNamespace(name="the CPU", total_memory=_BYTES, major=8, minor=0)
    general = {"device_count": ranks, "current_device_index": 0, "current_stream": _Idle()}  # Adam asks
    general |= dict.fromkeys(("set_device_index", "synchronize"))
    for owner, own in ((torch.cuda, answers), (torch.accelerator, general)):
        for name, answer in own.items():
            patched(owner, name, lambda *_, answer=answer, **__: answer)
    patched(torch.random, "fork_rng", lambda fork, *_, **own: fork(**own | {"devices": ()}))
    patched(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    patched(torch.cuda, "set_rng_state", lambda _, new_state, *__, **___: torch.set_rng_state(new_state))
    patched(torch.cuda, "get_rng_state_all", lambda _: [torch.get_rng_state()] * ranks)
    patched(torch.cuda, "set_rng_state_all", lambda _, new_states: torch.set_rng_state(new_states[0]))
    patched(torch, "load", lambda load, f, *_, **own: load(f, **own | {"map_location": "cpu"}))
    patched(DistributedDataParallel, "__init__", _make_without_devices)
    patched(nn.DataParallel, "__init__", _make_on_one_device)
    patched(torch.distributed, "barrier", lambda wait, *args, **_: wait(*args))


def _make_without_devices(
    make: Any, own: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **settings: Any
) -> None:
    make(own, module, None, None, *args, **settings)


def _make_on_one_device(make: Any, own: nn.DataParallel[Any], module: nn.Module, *_: Any, **__: Any) -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        make(own, module)
