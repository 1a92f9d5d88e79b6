"""Modes that want two devices on one: for runs of the command line, as `--trainer.strategy.class_path=...`."""

import torch
from lightning.pytorch.strategies import DDPStrategy

from lit_cifar.strategies import DataParallelStrategy, ShardedStrategy


def _twice() -> list[torch.device]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return [device] * 2


class TwoReplicas(DataParallelStrategy):
    """`dp` with both replicas on one device."""

    def __init__(self) -> None:
        super().__init__(parallel_devices=_twice())


class TwoRanks(DDPStrategy):
    """`ddp` with both processes on one device."""

    def __init__(self) -> None:
        super().__init__(parallel_devices=_twice(), process_group_backend="gloo")


class TwoRanksTensorParallel(ShardedStrategy):
    """`tp` with both processes on one device."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=None, process_group_backend="gloo")
        self.parallel_devices = _twice()
