"""The table of modes: their splits, numbers of devices, flags, and the computations that they equal."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning as L

from lit_cifar import strategies
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.errors import ConfigError
from lit_cifar.launch.rendezvous import cluster_environment
from lit_cifar.mode import Layout, mode_of
from lit_cifar.strategies.virtual_replicas import VirtualReplicas
from lit_cifar.task.module import LitResNet

Sizes = dict[str, int | str]
# Arguments of a Trainer that prints and writes nothing.
SILENT: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


@dataclass(frozen=True, kw_only=True)
class Mode:
    name: str  # name in `--trainer.strategy` and `configs/modes/`; "single" is one device without a strategy
    splits: str  # the things that are divided, and over which others
    processes: str  # number of processes, in terms of N devices and S stages
    min_devices: int = 2  # the smallest number of devices among which the mode divides the work
    multiple_of: int = 1  # numbers of devices that the strategy accepts are multiples of this
    divisor_of: int = 0  # numbers of devices that the strategy accepts are divisors of this; 0 allows any

    @property
    def has_processes(self) -> bool:
        return self.processes != "1"

    def counts(self, num_devices: int) -> list[int]:
        """The numbers of devices, up to `num_devices`, that the mode can use."""
        counts = range(self.min_devices, (1 if self.name == "single" else num_devices) + 1)
        return [count for count in counts if count % self.multiple_of == self.divisor_of % count == 0]

    def flags(self, num_devices: int) -> list[str]:
        strategy = [] if self.name == "single" else [f"--trainer.strategy={self.name}"]
        return [*strategy, f"--trainer.devices={num_devices}"]


MODES = (
    Mode(name="single", splits="nothing: the reference", processes="1", min_devices=1),
    Mode(name="dp", splits="the batch, over devices of one process", processes="1"),
    Mode(name="ddp", splits="the batch, over processes", processes="N"),
    Mode(name="ddp_spawn", splits="the same, started by multiprocessing", processes="N"),
    Mode(name="mp", splits="the layers, over devices of one process", processes="1"),
    Mode(
        name="ddp_mp",
        splits="batch over processes, layers over the devices of each",
        processes="N / S",
        min_devices=4,
        multiple_of=2,
    ),
    Mode(name="pp", splits="the layers, over processes", processes="N"),
    Mode(
        name="ddp_pp",
        splits="the batch over pipelines, the layers along each",
        processes="N",
        min_devices=4,
        multiple_of=2,
    ),
    Mode(name="fsdp2", splits="parameters, gradients and optimizer state", processes="N"),
    # The first blocks of `fit`'s default network have 64 channels.
    Mode(name="tp", splits="the tensors inside layers", processes="N", divisor_of=64),
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
        return [
            f"--trainer.strategy={self.strategy}",
            *(f"--trainer.strategy.{name}={value}" for name, value in self.sizes.items()),
            f"--trainer.devices={self.devices}",
            f"--trainer.sync_batchnorm={str(self.sync_batchnorm).lower()}",
        ]

    def ghost_batches(self, *, accumulation: int) -> GhostBatches:
        """The chunks of a global batch that BatchNorm normalises together in the mode."""
        chunks = GhostBatches.of(self.layout(), accumulation=accumulation)
        if not self.sync_batchnorm:
            return chunks
        return replace(chunks, synchronised=True) if accumulation > 1 else GhostBatches()

    def layout(self) -> Layout:
        return mode_of(self._trainer().strategy).layout

    def check(
        self, module: LitResNet, data: CIFAR10DataModule, sampler: TrainSampler, *, num_parts: int | None
    ) -> None:
        """Raise a `ConfigError` if `fit` would refuse sizes, network or batches in this mode.

        `sampler` is that of one device, `num_parts` the number of virtual replicas.
        """
        trainer = self._trainer()
        trainer.strategy.connect(module)
        replace(sampler, layout=mode_of(trainer.strategy).layout).check()
        if num_parts is not None:
            VirtualReplicas(num_parts).check(trainer, data)

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
    """Every mode for a number of devices, in the order of the table."""
    if not 1 <= devices <= 2**16:  # a Trainer lists its devices
        raise ConfigError(f"--devices={devices} is not from 1 to 65536", remedy="pass --devices 2")
    stages = 2 if devices % 2 == 0 else devices  # as many replicas as the devices allow
    microbatches = max(2, devices)  # a 1F1B pipeline needs as many as it has stages
    of = partial(SizedMode, devices=devices)
    layers: Sizes = {"num_stages": devices, "num_microbatches": 2}
    pipeline: Sizes = {"num_stages": devices, "num_microbatches": microbatches, "schedule": "1F1B"}
    pipelines: Sizes = {"num_stages": stages, "num_microbatches": 2, "schedule": "GPipe"}
    replicas: Sizes = {"num_stages": stages, "num_microbatches": 1}
    found = [
        SizedMode(name="single", strategy="auto", devices=1),
        of(name="dp", strategy="dp"),
        of(name="ddp", strategy="ddp"),
        of(name="ddp_flat", strategy="ddp_flat"),
        of(name="ddp-sync", strategy="ddp", sync_batchnorm=True),
        of(name="ddp_spawn", strategy="ddp_spawn"),
        of(name="mp", strategy="mp"),
        of(name="mp-micro", strategy="LayerParallelStrategy", sizes=layers),
        of(name="ddp_mp", strategy="DDPLayerParallelStrategy", sizes=replicas),
        of(name="pp", strategy="PipelineStrategy", sizes=pipeline),
        of(name="ddp_pp", strategy="PipelineStrategy", sizes=pipelines),
        of(name="fsdp2", strategy="fsdp2"),
        of(name="tp", strategy="tp"),
    ]
    if devices >= 4:  # with fewer devices it is one of the two
        sizes: Sizes = {"data_parallel_size": devices // 2, "tensor_parallel_size": 2}
        found.append(of(name="fsdp2-tp", strategy="ShardedStrategy", sizes=sizes))
    return {mode.name: mode for mode in found}


def chosen(names: list[str], *, devices: int) -> list[SizedMode]:
    if devices < 2:
        raise ConfigError(f"--devices={devices} leaves nothing to compare", remedy="pass --devices 2 or more")
    known = sized_modes(devices)
    unknown = [name for name in names if name not in known and name != "all"]
    if unknown or not names:
        raise ConfigError(
            f"there is no mode {unknown[0]!r} to verify" if unknown else "no mode is named",
            remedy=f"pass --modes all, or some of {','.join(known)}",
        )
    return [mode for name, mode in known.items() if name in names or "all" in names]
