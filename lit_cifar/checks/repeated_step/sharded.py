"""Modules whose parameters `fully_shard` (FSDP2) has divided: their whole tensors, and a copy that holds them whole."""

import copy
import sys
from collections.abc import Iterator
from traceback import walk_stack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Module = TypeVar("Module", bound=nn.Module)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that is divided over ranks, all of which must call this; return any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def what_is_not_replayed(module: nn.Module, *, autocast: bool) -> Iterator[str]:
    """Reasons why the ranks of a sharded module do not each compute what one device computes."""
    divided = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    by_fsdp = {id(p) for part in module.modules() if isinstance(part, FSDPModule) for p in part.parameters()}
    if any(id(p) not in by_fsdp or sum(place.is_shard() for place in p.placements) > 1 for p in divided):
        yield "tensor parallelism adds up parts of each layer in an order of its own"
    for part in module.modules():
        group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        device_type = next(module.parameters()).device.type if autocast else None
        if group is not None and not _is_that_of_autocast(group.mp_policy, device_type):
            yield "fully_shard has a precision of its own (mp_policy): pass precision=bf16-mixed to the trainer"
            return


def _is_that_of_autocast(policy: Any, device_type: str | None) -> bool:
    """Whether layers compute in the types of autocast, or of their parameters, and ranks add in that of parameters.

    `device_type` is the one for which autocast is on; None without autocast.
    """
    if policy.param_dtype is None or device_type is None:
        return policy.param_dtype is None
    same = policy.param_dtype == torch.get_autocast_dtype(device_type) and not policy.cast_forward_inputs
    return same and policy.reduce_dtype == torch.float32


def is_of_fsdp() -> bool:
    """Whether a collective that has just been called is one of FSDP's own."""
    callers = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(sys._getframe()))
    return any(name.startswith("torch.distributed.fsdp") for name in callers)


def whole_copy(module: Module, memo: dict[int, Any]) -> Module:
    """A copy with whole parameters that one process can train; every rank must call this.

    FSDP's modules refuse `copy.deepcopy`, so they and those that hold them are copied here; all others know best how
    they are copied. `memo` is an argument of `copy.deepcopy`; it gets the copies of parameters.
    """
    parts = [part for part in module.modules() if any(isinstance(inner, FSDPModule) for inner in part.modules())]
    for part in parts:
        kind: Any = type(part).__bases__[1] if isinstance(part, FSDPModule) else type(part)
        memo[id(part)] = object.__new__(kind)
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(whole(parameter).clone(), requires_grad=parameter.requires_grad)
    for part in parts:
        own = memo[id(part)]
        for name, value in vars(part).items():
            if name in ("_trainer", "_fabric", "_device_mesh"):
                value = None
            elif name in _HOOKS:
                value = type(value)((key, hook) for key, hook in value.items() if not _is_a_library_hook(hook))
            if not name.startswith("__composable"):
                vars(own)[name] = copy.deepcopy(value, memo)
    copied: Module = memo[id(module)]
    return copied


def _is_a_library_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")
