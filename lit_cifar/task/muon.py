"""Muon for the filters of convolutions, and SGD for all other parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_cifar import internals

# Applied repeatedly, the polynomial a * s + b * s**3 + c * s**5 brings singular values in (0, 1] near 1, small ones
# fastest. Coefficients of Jordan et al., "Muon: an optimizer for hidden layers", 2024.
_A, _B, _C = 3.4445, -4.7750, 2.0315


class MuonSGD(Optimizer):
    """Steps along the orthogonalised momentum of each convolution's filters (Jordan et al., "Muon", 2024).

    The filters of a convolution are a matrix with a row for each. A step sets its Frobenius norm to the square root of
    the number of rows, and takes `lr` times the nearest orthogonal matrix of the Nesterov momentum from it. The norm
    may be set because a BatchNorm layer follows. All other parameters take SGD's step with Nesterov momentum 0.9.

    Args:
        params: All parameters of a network.
        lr: Learning rate of the filters.
        lr_others: Learning rate of all other parameters.
        lr_biases: A separate rate of parameters with one dim. Weight decay still shrinks them as fast as the others.
        momentum: Momentum of the filters.
        weight_decay: Weight decay of all other parameters.
        iterations: Number of Newton-Schulz iterations that make a matrix orthogonal. They are computed in bfloat16 on a
            GPU, in the precision of the parameters on a CPU or if they are float64.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.05,
        *,
        lr_others: float = 0.3,
        lr_biases: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        iterations: int = 3,
    ) -> None:
        parameters = list(params)
        filters = [parameter for parameter in parameters if parameter.ndim == 4]
        others = [parameter for parameter in parameters if parameter.ndim != 4]
        groups: list[dict[str, Any]] = [
            {"params": filters, "lr": lr, "momentum": momentum, "iterations": iterations},
            {"params": others, "lr": lr_others, "momentum": 0.9, "weight_decay": weight_decay},
        ]
        if lr_biases is not None:
            groups[1]["params"] = [parameter for parameter in others if parameter.ndim != 1]
            biases = [parameter for parameter in others if parameter.ndim == 1]
            decay = weight_decay * lr_others / lr_biases if lr_biases else 0.0
            groups.append({"params": biases, "lr": lr_biases, "momentum": 0.9, "weight_decay": decay})
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "iterations": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            directions = self._nesterov(parameters, group["momentum"], group["weight_decay"])
            if group["iterations"]:
                _step_filters(parameters, directions, group["lr"], group["iterations"])
            else:
                internals.foreach_add_(parameters, directions, alpha=-group["lr"])
        return loss

    def _nesterov(self, parameters: list[Tensor], momentum: float, weight_decay: float) -> list[Tensor]:
        """The step of SGD with Nesterov momentum, before the learning rate."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if weight_decay:
            gradients = list(internals.foreach_add(gradients, parameters, alpha=weight_decay))
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        internals.foreach_mul_(buffers, momentum)
        internals.foreach_add_(buffers, gradients)
        return list(internals.foreach_add(gradients, buffers, alpha=momentum))


def _step_filters(parameters: list[Tensor], directions: list[Tensor], lr: float, iterations: int) -> None:
    """Step all matrices of a shape at once: a GPU would wait for the host if each were multiplied alone."""
    by_kind: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
    for weight, direction in zip(parameters, directions, strict=True):
        by_kind.setdefault((weight.device, weight.dtype, weight.shape), []).append((weight, direction))
    targets: list[Tensor] = []
    values: list[Tensor] = []
    for pairs in by_kind.values():
        matrices = [_ordered(weight, as_in=weight).view(len(weight), -1) for weight, _ in pairs]  # views of the weights
        momenta = torch.stack([_ordered(found, as_in=weight).reshape(len(found), -1) for weight, found in pairs])
        weights = torch.stack(matrices)
        weights *= weights.shape[1] ** 0.5 / weights.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)  # all may be 0
        weights.sub_(orthogonal(momenta, iterations=iterations), alpha=lr)
        targets += matrices
        values += weights.unbind()
    internals.foreach_copy_(targets, values)


def _ordered(filters: Tensor, *, as_in: Tensor) -> Tensor:
    """A view with the dimensions in the order in which those of `as_in` lie in memory.

    The order of a matrix's columns does not matter, if it is the same for weights and momentum.
    """
    return filters if as_in.is_contiguous() else filters.permute(0, 2, 3, 1)


def orthogonal(matrices: Tensor, *, iterations: int) -> Tensor:
    """Matrices (n, rows, columns) with their singular values brought near 1, between 0.5 and 1.5 after five iterations.

    On a GPU in bfloat16 unless `matrices` are float64, as rounding matters little here. The result has their type.
    """
    half = matrices.is_cuda and matrices.dtype == torch.float32
    found = matrices.to(torch.bfloat16) if half else matrices
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)  # no singular value is above 1 then
    for _ in range(iterations):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), found, beta=_A)
    return found.to(matrices.dtype)
