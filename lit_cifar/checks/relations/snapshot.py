"""The state of a training by name: weights, buffers, optimizers, schedules, and what the script keeps beside them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_cifar.checks.tensors import dense, whole

BESIDE = "kept/beside "  # begins the names of averages and modules that are called without gradients
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module)(?=\.)")
_DEEPEST, _LONGEST = 3, 300  # of the objects that a script keeps
_FOREIGN = ("torch", "lightning", "torchmetrics", "numpy", "builtins", "functools", "collections", "pathlib", "logging")


def snapshot(
    roots: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    schedules: Sequence[LRScheduler],
    kept: Mapping[str, Any],
) -> dict[str, Any]:
    """Copies of all tensors and numbers. All ranks must call this, as they may divide a tensor."""
    found: dict[str, Any] = {}
    names: dict[int, str] = {}
    for number, root in enumerate(outermost(roots)):
        prefix = f"{number}." if number else ""
        for name, parameter in root.named_parameters():
            names[id(parameter)] = prefix + plain(name)
            _add(found, f"weights/{prefix}{plain(name)}", parameter)
        for name, buffer in root.named_buffers():
            _add(found, f"buffers/{prefix}{plain(name)}", buffer)
    for number, optimizer in enumerate(optimizers):
        found |= dict(_of_optimizer(optimizer, f"{number}." if number else "", names))
    for number, schedule in enumerate(schedules):
        _add(found, f"schedule/{number}", schedule.state_dict())
    for name, value in kept.items():
        _add(found, f"kept/{name}", value)
    return found


def plain(name: str) -> str:
    """A name as it is without wrappers."""
    return _WRAPPERS.sub("", name).lstrip(".")


def outermost(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that are no part of another."""
    parts = {id(part) for root in roots for part in [*root.modules()][1:]}
    return [root for root in roots if id(root) not in parts]


def _of_optimizer(optimizer: Optimizer, prefix: str, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    for group_number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = prefix + names.get(id(parameter), f"group {group_number}.{place}")
            for what, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor | Real):
                    yield f"optimizer/{name}.{what}", _copy(torch.as_tensor(value))
            for what, value in group.items():
                if type(value) in (int, float):
                    yield f"settings/{name}.{what}", float(value)


def _copy(tensor: Tensor) -> Tensor:
    return dense(whole(tensor.detach())).cpu().clone()


def _add(found: dict[str, Any], name: str, value: Any, depth: int = 0) -> None:
    """Add tensors and numbers inside an object, a few levels deep."""
    if isinstance(value, Tensor):
        if value.layout is torch.sparse_coo:  # as a whole it may not fit into the memory
            sparse = value.detach().coalesce()
            found |= {f"{name}.indices": _copy(sparse.indices()), f"{name}.values": _copy(sparse.values())}
        elif not value.is_meta:  # such as weights that another process trains
            found[name] = _copy(value)
    elif isinstance(value, Real):
        found[name] = float(value)
    elif isinstance(value, GradScaler):
        _add(found, name, value.state_dict(), depth)
    elif isinstance(value, nn.Module):
        for own, tensor in (*value.named_parameters(), *value.named_buffers()):
            _add(found, f"{name}.{plain(own)}", tensor)
    elif depth <= _DEEPEST:
        for own, part in _parts_of(value):
            _add(found, f"{name}.{own}", part, depth + 1)


def _parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple) and len(value) < _LONGEST:
        yield from enumerate(value)
    elif type(value).__module__.split(".")[0] not in _FOREIGN and hasattr(value, "__dict__"):
        yield from ((name, part) for name, part in vars(value).items() if not name.startswith("__"))
