"""`dp`: the batch divided over the local devices of one process. Lightning removed its own in release 2.

Scatter, replicate and gather happen around the network alone (`replicas`). The module computes loss and metrics from
the gathered output on the root device, so everything after the network is the single-device code, and one optimizer
steps one set of parameters.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.network import Runner, compiles
from lit_cifar.strategies.replicas import DealtReplicas, replica_of, replicate
from lit_cifar.strategies.single_process import SingleProcessStrategy


class DataParallelStrategy(SingleProcessStrategy):
    """One process, one replica of the network per local device, each with its chunk of every batch.

    On CUDA the replicas run on the trainer's devices through `nn.DataParallel`; on the CPU, `devices=n` means n virtual
    devices that compute the same function. It equals one device that normalises each chunk separately: BatchNorm sees
    a replica's samples, and the running statistics are those of replica 0.

    Args:
        num_replicas: Number of replicas, a multiple of the number of devices; by default one for each device.
        **kwargs: Arguments of Lightning's `ParallelStrategy`.
    """

    strategy_name = "dp"
    description = "One process, one replica per local device"

    def __init__(self, num_replicas: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_replicas = num_replicas

    @property
    def replicas_per_rank(self) -> int:
        """Replicas over which the process divides each batch, known once the Trainer is made (see `BatchSplit.of`)."""
        return len(self.devices) if self.num_replicas is None else self.num_replicas

    def replica_of(self, num_samples: int) -> Tensor:
        """Which replica processes each sample of a batch of `num_samples`: int64, (num_samples,)."""
        if self.parts is not None:  # sample i is in part i modulo their number, and the replicas take turns
            return torch.arange(num_samples) % self.replicas_per_rank
        return replica_of(num_samples, num_replicas=self.replicas_per_rank)

    @override
    def make_runner(self, network: nn.Module) -> Runner:
        make = replicate if self.parts is None else DealtReplicas
        return make(network, self.copying_devices[0])

    @property
    @override
    def copying_devices(self) -> list[list[torch.device]]:
        each = self.replicas_per_rank // len(self.devices)
        return [[device for device in self.devices for _ in range(each)]]

    @override
    def connect(self, model: L.LightningModule) -> None:
        """Accept a module whose network can be replicated; one that is to be compiled cannot."""
        super().connect(model)
        if compiles(model):
            raise ConfigError(
                "--model.compile=true: --trainer.strategy=dp runs copies of the network in threads, and torch.compile "
                "would run the first one in all of them",
                remedy="leave it out, or use --trainer.strategy=ddp",
            )

    @override
    def check(self) -> None:
        """Find contradicting sizes and flags.

        Raises:
            ConfigError: More than one process or machine, replicas that the devices cannot share evenly, synchronised
                BatchNorm, or an accelerator without replicas.
        """
        super().check()
        num_devices = len(self.devices)
        if self.replicas_per_rank < 1 or self.replicas_per_rank % num_devices:
            nearest = max(1, round(self.replicas_per_rank / num_devices)) * num_devices
            raise ConfigError(
                f"--trainer.strategy.num_replicas={self.num_replicas} do not divide over "
                f"--trainer.devices={num_devices}",
                remedy=f"pass --trainer.strategy.num_replicas={nearest}, or leave it out",
            )
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
