"""Base of the modes in which one process drives several local devices, `dp` and `mp`."""

from abc import ABC
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.custom_forward import CustomForwardStrategy


class SingleProcessStrategy(CustomForwardStrategy, ABC):
    """One process on one machine, without communication; batches arrive at the first of its devices."""

    is_single_process = True
    with_processes = "ddp"  # the mode to use instead for several processes

    # Lightning assigns it from Trainer(num_nodes=...), but only to strategies that have the attribute.
    num_nodes: int = 1

    @property
    def devices(self) -> list[torch.device]:
        """The trainer's devices; on the CPU, `--trainer.devices=n` are n virtual ones."""
        return self.parallel_devices or []

    @property
    @override
    def root_device(self) -> torch.device:
        return self.devices[0]

    @property
    @override
    def global_rank(self) -> int:
        return 0

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The one process reads all the data, and divides batches after loading."""
        return {"num_replicas": 1, "rank": 0}

    @override
    def check(self) -> None:
        """Refuse other processes: each would train a model of its own."""
        super().check()
        name = self.strategy_name
        if self.num_nodes > 1:
            raise ConfigError(
                f"--trainer.strategy={name} is one process on one machine, but --trainer.num_nodes={self.num_nodes}.",
                remedy=f"Use --trainer.strategy={self.with_processes} for several machines.",
            )
        num_processes = self.cluster_environment.world_size() if self.cluster_environment is not None else 1
        if dist.is_torchelastic_launched() or num_processes > 1:
            raise ConfigError(
                f"--trainer.strategy={name} is one process, but {num_processes} were started by torchrun or a cluster.",
                remedy=f"Start it directly (python -m lit_cifar fit --trainer.strategy={name} --trainer.devices=2), "
                f"or use --trainer.strategy={self.with_processes}.",
            )

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            self.model.to(self.root_device)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`tensor` itself: there is one process."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """`tensor` itself, without a new first dimension, as Lightning's single-device strategy returns it."""
        return tensor

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to wait for."""

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return obj
