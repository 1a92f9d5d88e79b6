"""The flags with which every mode runs on one device, and the single-device computation that it then equals."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OnOneDevice:
    """A mode on one device.

    Attributes:
        name: In tables, and as the name of a folder.
        strategy: Flags.
        chunks: Flags by which one device without a strategy normalises as the mode does.
        quick: Whether it is part of the small size.
    """

    name: str
    strategy: tuple[str, ...] = ()
    chunks: tuple[str, ...] = ()
    quick: bool = False


def _own(name: str) -> tuple[str, ...]:
    """A class of `gpu_visit.one_device`."""
    return (f"--trainer.strategy.class_path=gpu_visit.one_device.{name}",)


def _sized(name: str, **sizes: int | str) -> tuple[str, ...]:
    return (f"--trainer.strategy={name}", *(f"--trainer.strategy.{key}={value}" for key, value in sizes.items()))


_MICROBATCHES = ("--model.ghost_batchnorm.num_microbatches=2",)
_SHARDS = ("--model.ghost_batchnorm.num_shards=2",)

ONE_PROCESS = (
    OnOneDevice("single", quick=True),
    OnOneDevice("dp-twice", _own("TwoReplicas"), ("--model.ghost_batchnorm.replicas_per_shard=2",), quick=True),
    OnOneDevice("mp", _sized("LayerParallelStrategy", num_stages=2)),
    OnOneDevice("mp-micro", _sized("LayerParallelStrategy", num_stages=2, num_microbatches=2), _MICROBATCHES),
    OnOneDevice("ddp", _sized("ddp")),
    OnOneDevice("fsdp2", _sized("fsdp2")),
    OnOneDevice("tp", _sized("tp")),
    OnOneDevice(
        "pp-interleaved",
        _sized("PipelineStrategy", schedule="Interleaved1F1B", num_microbatches=2),
        _MICROBATCHES,
        quick=True,
    ),
    OnOneDevice("pp-zbv", _sized("PipelineStrategy", schedule="ZBVZeroBubble", num_microbatches=2), _MICROBATCHES),
)
"""One process: of those that talk through NCCL it is the only one."""

TWO_RANKS = (
    OnOneDevice("ddp", _own("TwoRanks"), _SHARDS, quick=True),
    OnOneDevice("ddp-sync", (*_own("TwoRanks"), "--trainer.sync_batchnorm=true")),
    OnOneDevice("tp", _own("TwoRanksTensorParallel")),
)
"""Two processes that share the device, through gloo: NCCL refuses that, and gloo lacks what `fsdp2` and `pp` send."""


def chosen(modes: tuple[OnOneDevice, ...], *, on_gpu: bool) -> list[OnOneDevice]:
    """All, or those of the small size."""
    return [mode for mode in modes if on_gpu or mode.quick]
