"""A script that names CUDA and cannot do without it: its tensors and modules stay on the CPU."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from lit_cifar.checks.relations.patching import patched
from lit_cifar.checks.relations.plan import End

_CPU = torch.device("cpu")
_IDLE = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")


class _OnCpu(TorchFunctionMode):
    """Gives torch's functions the CPU wherever they are given a CUDA device, by its name or its number."""

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


def note_cuda(end: End) -> None:
    """Note that the script names CUDA, or asks whether it is there."""

    def asked(own: Any, *args: Any, **settings: Any) -> Any:
        end.wants_cuda = True
        return own(*args, **settings)

    for name in ("is_available", "device_count", "set_device", "_lazy_init"):
        patched(torch.cuda, name, asked)


def stay_on_cpu(ranks: int) -> None:
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
