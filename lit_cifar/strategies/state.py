"""Optimizer states that are divided over processes: one process's part, and the whole."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


def merge_optimizer_states(state: dict[str, Any], *, group: dist.ProcessGroup) -> dict[str, Any]:
    """The states of all parameters, gathered from processes with a part each; every process must call this.

    Args:
        state: An optimizer's `state_dict()` with the entries of this process's parameters alone.
        group: Processes that together have all parameters.

    Returns:
        The same with the states of all parameters, on the CPU and ordered as one process would have them.
    """
    own = {index: {name: _on_cpu(value) for name, value in entry.items()} for index, entry in state["state"].items()}
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group=group)
    merged = {index: entry for part in parts for index, entry in part.items()}
    return {**state, "state": dict(sorted(merged.items()))}


def only_parameters(state: dict[str, Any], optimizer: Optimizer, parameters: Iterable[Tensor]) -> dict[str, Any]:
    """`state` (an optimizer's `state_dict()`) with the entries of `parameters` alone."""
    wanted = {id(parameter) for parameter in parameters}
    all_parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = {index for index, parameter in enumerate(all_parameters) if id(parameter) in wanted}
    return {**state, "state": {index: entry for index, entry in state["state"].items() if index in indices}}


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
