"""What runs in processes of their own are given, where no test can patch anything."""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from lit_cifar.models import compiled
from lit_cifar.strategies import PipelineStrategy


class QuickCompiler(L.Callback):
    """Traces, cuts and differentiates as torch.compile does, and makes no kernels, which would take minutes."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        compiled.BACKEND = "aot_eager"


class SharesGPU(PipelineStrategy):
    """Has a process group that is tied to a GPU, as Lightning makes it where processes share one."""

    def setup_distributed(self) -> None:
        super().setup_distributed()
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
