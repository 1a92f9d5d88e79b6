"""Every mode that one process can run on one device, with its flags."""


def _flags(strategy: str, **sizes: int | str) -> list[str]:
    return [f"--trainer.strategy={strategy}", *(f"--trainer.strategy.{key}={value}" for key, value in sizes.items())]


ONE_PROCESS = {
    "single": [],
    "dp-twice": _flags("DataParallelStrategy", num_replicas=2),
    "mp": _flags("LayerParallelStrategy", num_stages=2),
    "mp-micro": _flags("LayerParallelStrategy", num_stages=2, num_microbatches=2),
    "ddp": _flags("ddp"),
    "fsdp2": _flags("fsdp2"),
    "tp": _flags("tp"),
    "pp": _flags("pp"),
}
"""One process: of those that talk through NCCL it is the only one."""

_QUICK = ("single", "dp-twice", "ddp")


def one_process(*, on_gpu: bool) -> dict[str, list[str]]:
    """All, or those of the small size."""
    return {name: flags for name, flags in ONE_PROCESS.items() if on_gpu or name in _QUICK}
