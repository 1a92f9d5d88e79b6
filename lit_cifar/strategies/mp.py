"""`mp`: the layers divided over the local devices of one process."""

from typing import Any

import torch
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.layer_parallel import StagedStrategy, device_names
from lit_cifar.strategies.single_process import SingleProcessStrategy


class LayerParallelStrategy(StagedStrategy, SingleProcessStrategy):
    """One process, consecutive layers of the one network on each of its devices.

    With one microbatch, the computation of one device, and one of the devices works at a time. With several, the
    devices work at the same time; equal to one device that normalises each microbatch by itself and moves the running
    statistics once for each.

    Args:
        num_stages: A multiple of the number of devices, each of which gets as many; by default one each.
        num_microbatches: Into how many pieces a batch is cut.
        cuts: The blocks with which the second and later stages begin, e.g. ["layer3.1"]; by default stages of about
            equal FLOP.
        **kwargs: As of Lightning's `ParallelStrategy`.
    """

    strategy_name = "mp"
    description = "One process, a stage of the network per local device"
    with_processes = "ddp_mp"

    def __init__(
        self,
        *,
        num_stages: int | None = None,
        num_microbatches: int = 1,
        cuts: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_stages=num_stages, num_microbatches=num_microbatches, cuts=cuts, **kwargs)

    @property
    @override
    def num_stages(self) -> int:
        return len(self.devices) if self._num_stages is None else self._num_stages

    @property
    @override
    def stage_devices(self) -> list[torch.device]:
        return [self.devices[index] for index in self._device_indices]

    @property
    def _device_indices(self) -> list[int]:
        return [stage * len(self.devices) // self.num_stages for stage in range(self.num_stages)]

    @override
    def check(self) -> None:
        """Find contradicting sizes and flags.

        Raises:
            ConfigError: More than one process or machine, less than one stage or microbatch, stages that the devices
                cannot share evenly, or synchronised BatchNorm with several microbatches.
        """
        super().check()
        num_devices = len(self.devices)
        if self.num_stages % num_devices:
            nearest = max(1, round(self.num_stages / num_devices)) * num_devices
            raise ConfigError(
                f"--trainer.strategy.num_stages={self.num_stages} do not divide over --trainer.devices={num_devices}",
                remedy=f"pass --trainer.strategy.num_stages={nearest} or --trainer.devices={self.num_stages}",
            )

    def split_lines(self) -> list[str]:
        """The stages and their devices, a line each."""
        names = device_names(self.devices)
        return self.partition.table([names[index] for index in self._device_indices])
