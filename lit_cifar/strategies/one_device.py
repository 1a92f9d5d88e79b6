"""Modes whose processes share one device, so that `verify` can run them on a machine with one GPU; not for speed.

NCCL refuses two processes on one device, gloo does not. But gloo neither sends a GPU's tensors from one process to
another, which `pp` needs, nor averages them, which `fsdp2` needs.
"""

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from lit_cifar.strategies.ddp_flat import FlatDDPStrategy
from lit_cifar.strategies.fsdp2 import ShardedStrategy
from lit_cifar.strategies.mp import DDPLayerParallelStrategy


class OneDeviceDDPStrategy(DDPStrategy):
    """`ddp` and `ddp_spawn`. Uses the trainer's one device as `num_devices` devices, and so do the others."""

    def __init__(self, *, num_devices: int = 2, **kwargs: Any) -> None:
        self._num_devices = num_devices
        super().__init__(process_group_backend="gloo", **kwargs)

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
    """`tp`."""
