"""`ddp_mp`: the batch divided over processes, the layers over each process's own devices."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.mp import StagedStrategy, device_names


class DDPLayerParallelStrategy(StagedStrategy, DDPStrategy):
    """Starts processes as Lightning's `ddp` does, each with a replica of the network on `num_stages` devices.

    `--trainer.devices` counts the devices of a machine, as always. Equal to `ddp` with as many processes; with several
    microbatches to one device that normalises each microbatch of each replica separately.

    Args:
        num_stages: Number of stages, and of devices of a process.
        **kwargs: As of `StagedStrategy`: `num_microbatches`, `cuts`; and of Lightning's `DDPStrategy`:
            `process_group_backend`, `timeout`, `start_method`.
    """

    strategy_name = "ddp_mp"

    def __init__(self, *, num_stages: int = 2, **kwargs: Any) -> None:
        super().__init__(num_stages=num_stages, **kwargs)

    @property
    def devices_per_process(self) -> int:
        return self.num_stages

    @property
    @override
    def num_processes(self) -> int:
        # At least 1, as Lightning asks before `check` can refuse fewer stages.
        return len(self.parallel_devices or ()) // max(1, self.num_stages)

    @property
    @override
    def root_device(self) -> torch.device:
        return self.stage_devices[0]

    @property
    @override
    def stage_devices(self) -> list[torch.device]:
        return self._devices_of(self.local_rank)

    @property
    @override
    def copying_devices(self) -> list[list[torch.device]]:
        return [self._devices_of(local_rank) for local_rank in range(self.num_processes)]

    def _devices_of(self, local_rank: int) -> list[torch.device]:
        return (self.parallel_devices or [])[local_rank * self.num_stages :][: self.num_stages]

    @override
    def check(self) -> None:
        super().check()
        num_devices, each = len(self.parallel_devices or ()), self.num_stages
        if num_devices % each or not num_devices:
            nearest = max(1, round(num_devices / each)) * each
            raise ConfigError(
                f"--trainer.strategy={self.strategy_name} with {each} stages does not divide "
                f"--trainer.devices={num_devices} into processes",
                remedy=f"pass --trainer.devices={nearest}, or --trainer.strategy={type(self).__name__} "
                f"--trainer.strategy.num_stages={num_devices}",
            )
        assert self.cluster_environment is not None
        started, wanted = self.cluster_environment.world_size(), self.num_nodes * self.num_processes
        if started != wanted:
            raise ConfigError(
                f"{started} processes were started, but --trainer.devices={num_devices} with {self.num_stages} stages "
                f"on {self.num_nodes} machine(s) are {wanted}",
                remedy=f"start torchrun with --nproc-per-node={self.num_processes}: a process drives "
                f"{self.num_stages} devices",
            )

    @override
    def setup_distributed(self) -> None:
        """As Lightning does, but without binding the process group to the root device: other stages have others."""
        assert self.cluster_environment is not None
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        _init_dist_connection(self.cluster_environment, self._process_group_backend, timeout=self._timeout)

    @override
    def determine_ddp_device_ids(self) -> None:
        """None: DistributedDataParallel then accepts a module on several devices."""

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            return
        # Without device ids NCCL would use the device of the process's rank, which may belong to another process.
        device_ids = [self.root_device.index] if dist.get_backend() == "nccl" else None
        dist.barrier(device_ids=device_ids)

    def split_lines(self) -> list[str]:
        """The stages and their devices, a line each, and the devices of the machine's further processes."""
        names = [
            device_names(devices, first=rank * self.num_stages) for rank, devices in enumerate(self.copying_devices)
        ]
        others = [f"process {rank}: the same on {', '.join(place)}" for rank, place in enumerate(names)]
        return self.partition.table(names[0]) + others[1:]
