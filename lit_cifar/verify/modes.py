"""Which modes can be compared, with which flags each runs, and what each equals."""

from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L

from lit_cifar import strategies
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.errors import ConfigError
from lit_cifar.launch.rendezvous import cluster_environment
from lit_cifar.layout import GhostBatches, Layout
from lit_cifar.module import LitResNet

Sizes = dict[str, int | str]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A strategy with its sizes for a number of devices.

    Attributes:
        name: What `--modes` and the table call it.
        strategy: What `--trainer.strategy` takes: a registered name, or the name of a class that gets `sizes`.
        devices: What `--trainer.devices` takes.
        sizes: The class's arguments.
        sync_batchnorm: Whether BatchNorm is synchronised.
    """

    name: str
    strategy: str
    devices: int
    sizes: Sizes = field(default_factory=dict)
    sync_batchnorm: bool = False

    @property
    def flags(self) -> list[str]:
        """The mode's flags, to be added to the user's own."""
        return [
            f"--trainer.strategy={self.strategy}",
            *(f"--trainer.strategy.{name}={value}" for name, value in self.sizes.items()),
            f"--trainer.devices={self.devices}",
            f"--trainer.sync_batchnorm={str(self.sync_batchnorm).lower()}",
        ]

    def chunks(self, *, accumulation: int) -> GhostBatches:
        """How the mode cuts a global batch into the chunks that BatchNorm normalises together.

        Raises:
            ConfigError: The strategy cannot work with these sizes.
        """
        chunks = self.layout().chunks(accumulation=accumulation)
        if not self.sync_batchnorm:
            return chunks
        return replace(chunks, synchronised=True) if accumulation > 1 else GhostBatches()

    def layout(self) -> Layout:
        """The layout of its replicas."""
        return Layout.of(self._strategy())

    def check(self, module: LitResNet, sampler: TrainSampler) -> None:
        """Raise a `ConfigError` before anything runs if `fit` would refuse sizes, network or batches in this mode.

        Args:
            module: The module whose network is trained.
            sampler: The sampler of one device.
        """
        strategy = self._strategy()
        strategy.connect(module)
        replace(sampler, layout=Layout.of(strategy)).check()

    @property
    def num_processes(self) -> int:
        """Number of processes of the mode on this machine."""
        return int(getattr(self._strategy(), "num_processes", 1))

    @property
    def num_ranks(self) -> int:
        """Number of processes to start from outside: all but those of `ddp_spawn`, which starts its own."""
        return 1 if self.name == "ddp_spawn" else self.num_processes

    def _strategy(self) -> Any:
        """The strategy, on a Trainer that starts no processes: it knows best what follows from its sizes."""
        strategy: Any = getattr(strategies, self.strategy)(**self.sizes) if self.sizes else self.strategy
        trainer = L.Trainer(
            accelerator="cpu",
            strategy=strategy,
            devices=self.devices,
            plugins=[cluster_environment()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        return trainer.strategy


def modes(devices: int) -> dict[str, Mode]:
    """Every mode for a number of devices, in the order of the table.

    `ddp_mp` and `ddp_pp` form as many replicas of two stages as there are devices for.
    """
    stages = 2 if devices % 2 == 0 else devices
    microbatches = max(2, devices)  # a 1F1B pipeline needs as many as it has stages
    found = [
        Mode(name="single", strategy="auto", devices=1),
        Mode(name="dp", strategy="dp", devices=devices),
        Mode(name="ddp", strategy="ddp", devices=devices),
        Mode(name="ddp-sync", strategy="ddp", devices=devices, sync_batchnorm=True),
        Mode(name="ddp_spawn", strategy="ddp_spawn", devices=devices),
        Mode(name="mp", strategy="mp", devices=devices),
        Mode(
            name="mp-micro",
            strategy="LayerParallelStrategy",
            devices=devices,
            sizes={"num_stages": devices, "num_microbatches": 2},
        ),
        Mode(
            name="ddp_mp",
            strategy="DDPLayerParallelStrategy",
            devices=devices,
            sizes={"num_stages": stages, "num_microbatches": 1},
        ),
        Mode(
            name="pp",
            strategy="PipelineStrategy",
            devices=devices,
            sizes={"num_stages": devices, "num_microbatches": microbatches, "schedule": "1F1B"},
        ),
        Mode(
            name="ddp_pp",
            strategy="PipelineStrategy",
            devices=devices,
            sizes={"num_stages": stages, "num_microbatches": 2, "schedule": "GPipe"},
        ),
        Mode(name="fsdp2", strategy="fsdp2", devices=devices),
        Mode(name="tp", strategy="tp", devices=devices),
    ]
    if devices >= 4:  # with fewer it is one of the two
        sizes: Sizes = {"data_parallel_size": devices // 2, "tensor_parallel_size": 2}
        found.append(Mode(name="fsdp2-tp", strategy="ShardedStrategy", devices=devices, sizes=sizes))
    return {mode.name: mode for mode in found}


def chosen(names: list[str], *, devices: int) -> list[Mode]:
    """The modes called `names`, "all" for every one.

    Raises:
        ConfigError: A name that is not known, or fewer than two devices.
    """
    if devices < 2:
        raise ConfigError(f"--devices={devices} leaves nothing to compare", remedy="pass --devices 2 or more")
    known = modes(devices)
    unknown = [name for name in names if name not in known and name != "all"]
    if unknown or not names:
        raise ConfigError(
            f"there is no mode {unknown[0]!r} to verify" if unknown else "no mode is named",
            remedy=f"pass --modes all, or some of {','.join(known)}",
        )
    return [mode for name, mode in known.items() if name in names or "all" in names]


def in_words(chunks: GhostBatches, *, batch_size: int) -> str:
    """The single-device computation, e.g. "one device, 2 x 16 images normalised apart"."""
    num_chunks = chunks.accumulation
    if not chunks.synchronised:
        num_chunks *= chunks.num_shards * chunks.replicas_per_shard * chunks.num_microbatches
    if num_chunks == 1:
        return "one device"
    return f"one device, {num_chunks} x {batch_size // num_chunks} images normalised apart"
