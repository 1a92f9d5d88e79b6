"""Callbacks for runs in processes of their own, where no test can patch anything."""

from typing import Any

import lightning as L

from lit_cifar.models import compiled


class QuickCompiler(L.Callback):
    """Traces, cuts and differentiates as torch.compile does, and makes no kernels, which would take minutes."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        compiled.BACKEND = "aot_eager"
