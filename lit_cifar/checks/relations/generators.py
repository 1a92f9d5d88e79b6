"""Random generators that follow the step, and computations without random numbers or statistics of a batch."""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.checks.relations.patching import patched


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
        patched(F, name, lambda _: _untouched)
    patched(F, "scaled_dot_product_attention", _without_dropout)
    patched(F, "batch_norm", _of_running_statistics)
    patched(nn.SyncBatchNorm, "forward", lambda _: nn.BatchNorm1d.forward)


def _without_dropout(attention: Any) -> Callable[..., Tensor]:
    def attend(*args: Any, dropout_p: float = 0.0, **settings: Any) -> Tensor:
        return attention(*args[:4], **settings)  # type: ignore[no-any-return]

    return attend


def _of_running_statistics(norm: Any) -> Callable[..., Tensor]:
    def normalized(
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
        found: Tensor = norm(input, running_mean, running_var, weight, bias, of_batch, momentum, eps)
        return found

    return normalized


def still(module: nn.Module) -> None:
    """Turn off the dropout that layers hand to torch as a number."""
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0


def _untouched(input: Tensor, *args: Any, **settings: Any) -> Tensor:
    return input
