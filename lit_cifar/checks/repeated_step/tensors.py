"""Tensors of a module and its optimizers by name, and copies of what a step is given."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar.mode.tensors import parameters_of


def fresh_copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(leaf)


def device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def names_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[Tensor, str]:
    """The name of each parameter, for tied ones the first. An optimizer may hold parameters that no module has."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for place, parameter in enumerate(parameters_of(optimizer)):
            names.setdefault(parameter, f"parameter {place} of optimizer {number}")
    return names


def as_real(tensor: Tensor) -> Tensor:
    """The tensor itself, or real and imaginary parts of a complex one, which `Tensor.double` would drop."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
