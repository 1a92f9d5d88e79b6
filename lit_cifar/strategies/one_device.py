"""Modes whose processes share one device, so that `verify` can run them on a machine with one GPU.

NCCL refuses two processes on one device, gloo does not.
"""

from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import DDPStrategy

from lit_cifar.strategies import host_gloo
from lit_cifar.strategies.ddp_flat import FlatDDPStrategy
from lit_cifar.strategies.fsdp2 import ShardedStrategy
from lit_cifar.strategies.mp import DDPLayerParallelStrategy
from lit_cifar.strategies.pp import PipelineStrategy


class OneDeviceDDPStrategy(DDPStrategy):
    """`ddp` and `ddp_spawn`. Uses the trainer's one device as `num_devices` devices, like all modes here."""

    backend: ClassVar = "gloo"

    def __init__(self, *, num_devices: int = 2, **kwargs: Any) -> None:
        self._num_devices = num_devices
        super().__init__(process_group_backend=self.backend, **kwargs)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device, repeated `num_devices` times; known once the Trainer is made."""
        return self._devices and self._devices * self._num_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = devices and devices[:1]


class OneDeviceDDPLayerParallelStrategy(OneDeviceDDPStrategy, DDPLayerParallelStrategy):
    """`ddp_mp`."""


class OneDeviceFlatDDPStrategy(OneDeviceDDPStrategy, FlatDDPStrategy):
    """`ddp` with CUDA graphs."""


class OneDeviceShardedStrategy(OneDeviceDDPStrategy, ShardedStrategy):
    """`fsdp2` and `tp`."""

    backend = host_gloo.BACKEND


class OneDevicePipelineStrategy(OneDeviceDDPStrategy, PipelineStrategy):
    """`pp` and `ddp_pp`."""

    backend = host_gloo.BACKEND
