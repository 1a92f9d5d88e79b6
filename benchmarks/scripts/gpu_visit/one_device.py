"""Every mode on one device: its flags, and strategies that put on it what wants two devices."""

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


def _flags(strategy: str, **sizes: int | str) -> list[str]:
    return [f"--trainer.strategy={strategy}", *(f"--trainer.strategy.{key}={value}" for key, value in sizes.items())]


def _own(strategy: type) -> list[str]:
    return [f"--trainer.strategy.class_path={strategy.__module__}.{strategy.__name__}"]


ONE_PROCESS = {
    "single": [],
    "dp-twice": _own(TwoReplicas),
    "mp": _flags("LayerParallelStrategy", num_stages=2),
    "mp-micro": _flags("LayerParallelStrategy", num_stages=2, num_microbatches=2),
    "ddp": _flags("ddp"),
    "fsdp2": _flags("fsdp2"),
    "tp": _flags("tp"),
    "pp-interleaved": _flags("PipelineStrategy", schedule="Interleaved1F1B", num_microbatches=2),
    "pp-zbv": _flags("PipelineStrategy", schedule="ZBVZeroBubble", num_microbatches=2),
}
"""One process: of those that talk through NCCL it is the only one."""

TWO_RANKS = {
    "ddp": _own(TwoRanks),
    "ddp-sync": [*_own(TwoRanks), "--trainer.sync_batchnorm=true"],
    "tp": _own(TwoRanksTensorParallel),
}
"""Two processes that share the device, through gloo: NCCL refuses that, and gloo lacks what `fsdp2` and `pp` send."""

_QUICK = ("single", "dp-twice", "ddp", "pp-interleaved")


def chosen(modes: dict[str, list[str]], *, on_gpu: bool) -> dict[str, list[str]]:
    """All, or those of the small size."""
    return {name: flags for name, flags in modes.items() if on_gpu or name in _QUICK}


def equivalent(flags: list[str]) -> list[str]:
    """Flags by which one device without a strategy normalises the same samples together."""
    if flags == _own(TwoReplicas):
        return ["--model.ghost_batchnorm.replicas_per_rank=2"]
    if flags == _own(TwoRanks):
        return ["--model.ghost_batchnorm.dp_size=2"]
    in_microbatches = "--trainer.strategy.num_microbatches=2" in flags
    return ["--model.ghost_batchnorm.num_microbatches=2"] if in_microbatches else []
