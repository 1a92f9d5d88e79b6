"""Random generators that follow the step, and computations without random numbers or statistics of a batch."""

import hashlib
import random
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def seed_all(*numbers: object) -> None:
    """Seed the generators of torch, NumPy and Python by these."""
    number = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "little")
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def make_quiet() -> None:
    """Turn dropout off, and let BatchNorm take its running statistics.

    Both are others by right where the same samples come in other batches.
    """
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(F, name, _untouched)
    attention, norm = F.scaled_dot_product_attention, F.batch_norm

    @wraps(attention)
    def without_dropout(*args: Any, dropout_p: float = 0.0, **settings: Any) -> Tensor:
        return attention(*args[:4], **settings)

    @wraps(norm)
    def of_running_statistics(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        of_batch = training and running_mean is None
        return norm(input, running_mean, running_var, weight, bias, of_batch, momentum, eps)

    F.scaled_dot_product_attention, F.batch_norm = without_dropout, of_running_statistics
    nn.SyncBatchNorm.forward = _running_statistics  # type: ignore[method-assign]


def still(module: nn.Module) -> None:
    """Turn off the dropout that layers hand to torch as a number."""
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0


def _untouched(input: Tensor, *args: Any, **settings: Any) -> Tensor:
    return input


def _running_statistics(layer: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    mean, var = layer.running_mean, layer.running_var
    return F.batch_norm(input, mean, var, layer.weight, layer.bias, layer.training, 0.1, layer.eps)
