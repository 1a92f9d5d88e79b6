"""The optimizer of the default recipe; all others are torch.optim's own."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import SGD


class NesterovSGD(SGD):
    """SGD with Nesterov momentum 0.9 and weight decay 5e-4, as for Wide ResNets (Zagoruyko and Komodakis, 2016).

    A class, as the command line gives the settings of the default optimizer to any other that is chosen instead: one
    whose settings but `lr` are unset has nothing to give.

    Args:
        params: As of SGD.
        lr: As of SGD.
        fused: As of SGD: all parameters in one kernel.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 0.1, *, fused: bool | None = None
    ) -> None:
        super().__init__(params, lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=fused)
