"""Rare classes: factors of their loss, or as many draws as others have."""

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from lit_cifar.errors import ConfigError, clash


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What is done for rare classes.

    Args:
        class_weights: Factors of the losses by class, in the order of the classes, or "balanced": in inverse proportion
            to the number of training images. They are divided by their mean over the global batch.
        draw_equally: Draw each class equally often in an epoch, of as many samples as before: rare ones repeat.
    """

    class_weights: Literal["balanced"] | list[float] | None = None
    draw_equally: bool = False

    def __post_init__(self) -> None:
        weights = self.class_weights
        if isinstance(weights, list) and not all(0 < factor < inf for factor in weights):
            problem = f"--data.balance.class_weights={weights}: a factor of a loss is positive and finite"
            raise ConfigError(problem, remedy="pass one factor for each class, or balanced")
        if weights == "balanced" and self.draw_equally:
            raise clash("--data.balance.class_weights=balanced", "draw_equally=true", "both correct rare classes")

    def factors(self, labels: Tensor, classes: tuple[str, ...]) -> Tensor | None:
        """Factors of the loss of each class, float32, (C,), if any; `labels`, int64, (N,), are those to train on."""
        if self.class_weights is None:
            return None
        if self.class_weights == "balanced":
            return 1 / torch.bincount(labels, minlength=len(classes)).clamp(min=1)
        if len(self.class_weights) != len(classes):
            problem = f"--data.balance.class_weights has {len(self.class_weights)} factors for {len(classes)} classes"
            raise ConfigError(problem, remedy=f"pass one for each of {', '.join(classes[:5])} ...")
        return torch.tensor(self.class_weights)
