"""The optimizer of the default recipe; all others are torch.optim's own."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import SGD


class NesterovSGD(SGD):
    """SGD with Nesterov momentum 0.9 and weight decay 5e-4, as for Wide ResNets (Zagoruyko and Komodakis, 2016).

    It is a class because the command line passes explicit settings of the default optimizer on to any other that is
    chosen instead. Here only `lr` is explicit.

    Args:
        params: As of SGD.
        lr: As of SGD.
        fused: As of SGD: all parameters in one kernel.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 0.1, *, fused: bool | None = None
    ) -> None:
        super().__init__(params, lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=fused)
