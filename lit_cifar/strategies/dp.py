"""`dp`: the batch divided over the local devices of one process. Lightning removed its own in release 2.

Scatter, replicate and gather happen around the network alone. The module computes loss and metrics from the gathered
output on the root device, so everything after the network is the single-device code, and one optimizer steps one set
of parameters.
"""

from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.network import RunsNetwork, as_runs_network, runs_network
from lit_cifar.strategies.replicate import replica_of, replicate


class DataParallelStrategy(ParallelStrategy):
    """One process, one replica of the network per local device, each with its chunk of every batch.

    On CUDA the replicas run on the trainer's devices through `nn.DataParallel`; on the CPU, `devices=n` means n virtual
    devices that compute the same function. Equal to one device that normalises each chunk by itself: BatchNorm sees a
    replica's samples, and the running statistics are those of replica 0.
    """

    strategy_name = "dp"

    # Lightning assigns it from Trainer(num_nodes=...), but only to strategies that have the attribute.
    num_nodes: int = 1

    @property
    @override
    def root_device(self) -> torch.device:
        return self._devices[0]

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
        """The one process reads all the data; its batches are divided after loading."""
        return {"num_replicas": 1, "rank": 0}

    @property
    def replicas_per_shard(self) -> int:
        """Replicas over which the process divides each batch, known once the Trainer is made (see `Layout.of`)."""
        return len(self._devices)

    def replica_of(self, num_samples: int) -> Tensor:
        """Which replica processes each sample of a batch of `num_samples`: int64, (num_samples,)."""
        return replica_of(num_samples, num_replicas=self.replicas_per_shard)

    @override
    def connect(self, model: L.LightningModule) -> None:
        """Accept a module whose network can be run by a strategy.

        Raises:
            ConfigError: `model` has no `network` and `use_runner`.
        """
        as_runs_network(model, strategy=self.strategy_name)
        super().connect(model)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        module = cast(RunsNetwork, self.lightning_module)
        module.use_runner(replicate(module.network, self._devices))

    @override
    def teardown(self) -> None:
        # Also reached when `connect` or `setup` failed, so nothing may be taken for granted.
        if runs_network(self.lightning_module):
            cast(RunsNetwork, self.lightning_module).use_runner(None)
        super().teardown()

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

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make `strategy="dp"` known; registering again, as a reloaded module does, replaces the entry."""
        strategy_registry.register(
            cls.strategy_name, cls, description="One process, one replica per local device", override=True
        )

    @override
    def _configure_launcher(self) -> None:
        """Refuse what cannot work. Lightning calls this last while a Trainer is made, when every flag has arrived.

        Raises:
            ConfigError: More than one process or machine, synchronised BatchNorm, or an accelerator without replicas.
        """
        _refuse_other_processes(self)
        if self._layer_sync is not None:
            raise ConfigError(
                "--trainer.sync_batchnorm=true has no effect on --trainer.strategy=dp: each replica normalises its own "
                "chunk of the batch.",
                remedy="Drop --trainer.sync_batchnorm, or use --trainer.strategy=ddp.",
            )
        if self.root_device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"--trainer.strategy=dp has replicas on cpu and cuda, not on {self.root_device.type}.",
                remedy="Use --trainer.accelerator=cpu, or drop --trainer.strategy.",
            )

    @property
    def _devices(self) -> list[torch.device]:
        return self.parallel_devices or []


def _refuse_other_processes(strategy: DataParallelStrategy) -> None:
    """Raise ConfigError if other processes take part: each would train a whole model of its own, unseen by the rest."""
    if strategy.num_nodes > 1:
        raise ConfigError(
            f"--trainer.strategy=dp is one process on one machine, but --trainer.num_nodes={strategy.num_nodes}.",
            remedy="Use --trainer.strategy=ddp for several machines.",
        )
    environment = strategy.cluster_environment
    num_processes = environment.world_size() if environment is not None else 1
    if dist.is_torchelastic_launched() or num_processes > 1:
        raise ConfigError(
            f"--trainer.strategy=dp is one process, but {num_processes} were started by torchrun or a cluster.",
            remedy="Start it directly (python -m lit_cifar fit --trainer.strategy=dp --trainer.devices=2), "
            "or use --trainer.strategy=ddp.",
        )
