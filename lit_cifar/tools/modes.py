"""The modes with sizes and flags for a number of devices, on one GPU too, and the computation that each equals."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning as L

from lit_cifar import strategies
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.launch.world_size import cluster_environment
from lit_cifar.mode import Layout, mode_of
from lit_cifar.mode.table import MODES

Sizes = dict[str, int | str]
# Arguments of a Trainer that prints and writes nothing.
SILENT: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


@dataclass(frozen=True, kw_only=True)
class SizedMode:
    """A mode with its sizes for a number of devices, as `verify` compares it with one device."""

    name: str  # name in `--modes` and the table
    strategy: str  # value of `--trainer.strategy`: a registered name, or the name of a class that gets `sizes`
    devices: int  # value of `--trainer.devices`
    sizes: Sizes = field(default_factory=dict)
    sync_batchnorm: bool = False

    @property
    def flags(self) -> list[str]:
        """Flags of `fit`, but for BatchNorm."""
        sizes = [f"--trainer.strategy.{name}={value}" for name, value in self.sizes.items()]
        return [f"--trainer.strategy={self.strategy}", *sizes, f"--trainer.devices={self.devices}"]

    def ghost_batches(self, *, accumulation: int) -> GhostBatches:
        """The chunks of a global batch that BatchNorm normalises together in the mode."""
        chunks = GhostBatches.of(self.layout(), accumulation=accumulation)
        if not self.sync_batchnorm:
            return chunks
        return replace(chunks, synchronised=True) if accumulation > 1 else GhostBatches()

    def layout(self) -> Layout:
        return mode_of(self._trainer().strategy).layout

    def with_parts(self) -> "SizedMode":
        """The mode for virtual replicas, which are the microbatches of a pipeline."""
        if self.strategy != "PipelineStrategy":
            return self
        return replace(self, sizes={name: size for name, size in self.sizes.items() if name != "num_microbatches"})

    @property
    def num_processes(self) -> int:
        return mode_of(self._trainer().strategy).num_local_processes

    @property
    def num_ranks(self) -> int:
        """Number of processes to start from outside: all but those of `ddp_spawn`, which starts its own."""
        return 1 if self.name == "ddp_spawn" else self.num_processes

    def _trainer(self) -> L.Trainer:
        """A Trainer that starts no processes, whose strategy tells what follows from the sizes."""
        strategy: Any = getattr(strategies, self.strategy)(**self.sizes) if self.sizes else self.strategy
        return L.Trainer(
            accelerator="cpu",
            strategy=strategy,
            devices=self.devices,
            plugins=[cluster_environment()],
            sync_batchnorm=self.sync_batchnorm,
            **SILENT,
        )


def sized_modes(devices: int) -> dict[str, SizedMode]:
    stages = 2 if devices % 2 == 0 else devices  # as many replicas as the devices allow
    microbatches = max(2, devices)  # a 1F1B pipeline needs as many as it has stages
    sized = partial(SizedMode, devices=devices)
    layers: Sizes = {"num_stages": devices, "num_microbatches": 2}
    pipeline: Sizes = {"num_stages": devices, "num_microbatches": microbatches, "schedule": "1F1B"}
    pipelines: Sizes = {"num_stages": stages, "num_microbatches": 2, "schedule": "GPipe"}
    replicas: Sizes = {"num_stages": stages, "num_microbatches": 1}
    others = {
        "single": SizedMode(name="single", strategy="auto", devices=1),
        "ddp_mp": sized(name="ddp_mp", strategy="DDPLayerParallelStrategy", sizes=replicas),
        "pp": sized(name="pp", strategy="PipelineStrategy", sizes=pipeline),
        "ddp_pp": sized(name="ddp_pp", strategy="PipelineStrategy", sizes=pipelines),
    }
    synchronised = sized(name="ddp-sync", strategy="ddp", sync_batchnorm=True)
    variants = {
        "ddp": [sized(name="ddp_flat", strategy="ddp_flat"), synchronised],
        "mp": [sized(name="mp-micro", strategy="LayerParallelStrategy", sizes=layers)],
    }
    found: list[SizedMode] = []
    for row in MODES:
        found += [others.get(row.name) or sized(name=row.name, strategy=row.name), *variants.get(row.name, [])]
    return {mode.name: mode for mode in found}


def chosen(names: list[str], *, devices: int) -> list[SizedMode]:
    if not 2 <= devices <= 2**16:  # a Trainer lists its devices
        raise ConfigError(f"--devices={devices} is not from 2 to 65536", remedy="pass --devices 2")
    known = sized_modes(devices)
    unknown = [name for name in names if name not in known and name != "all"]
    if unknown or not names:
        problem = f"there is no mode {unknown[0]!r} to verify" if unknown else "no mode is named"
        raise ConfigError(problem, remedy=f"pass --modes all, or some of {','.join(known)}")
    return [mode for name, mode in known.items() if name in names or "all" in names]


# The class that stands for a mode on one GPU; for all others `OneDeviceDDPStrategy`.
_ON_ONE_GPU = {
    **dict.fromkeys(("mp", "mp-micro"), "LayerParallelStrategy"),
    **dict.fromkeys(("pp", "ddp_pp"), "OneDevicePipelineStrategy"),
    **dict.fromkeys(("fsdp2", "tp"), "OneDeviceShardedStrategy"),
    "dp": "DataParallelStrategy",
    "ddp_flat": "OneDeviceFlatDDPStrategy",
    "ddp_mp": "OneDeviceDDPLayerParallelStrategy",
}
_NUMBER = {"DataParallelStrategy": "num_replicas", "LayerParallelStrategy": "num_stages"}  # of devices, by argument


def placed(mode: SizedMode, *, num_gpus: int) -> SizedMode:
    """`mode` on at most `num_gpus` GPUs; `mode` itself on the CPU, for which that is 0, and where they suffice."""
    if num_gpus == 0 or mode.devices <= num_gpus:
        return mode
    strategy = _ON_ONE_GPU.get(mode.name, "OneDeviceDDPStrategy")
    sizes: Sizes = {_NUMBER.get(strategy, "num_devices"): mode.devices, **mode.sizes}
    if mode.name == "ddp_spawn":
        sizes["start_method"] = "spawn"
    elif mode.name == "tp":
        sizes["splits_layers"] = True
    return replace(mode, strategy=strategy, sizes=sizes, devices=1)
