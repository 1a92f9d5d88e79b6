"""The training that is hit: which modes, which flags, how long."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lit_cifar.batch_split import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.modes import Variant, variants
from lit_cifar.verify.runs import quiet

JOURNAL = "lit_cifar.chaos.sample_log.Journal"

EVERY_N_STEPS = 4
ANEW_EVERY = 4
NUM_SAMPLES = 628
_BATCH_SIZE = 32
STEPS_PER_EPOCH = -(-NUM_SAMPLES // _BATCH_SIZE)
_STEPS_PER_FAULT = 8  # beyond the few that are repeated after one

# Small steps. The last batch of an epoch has 20 images, which divide among two replicas of two microbatches.
_FLAGS = (
    "--model.stem=imagenet",
    "--model.optimizer.lr=1e-4",
    "--data.dataset=synthetic",
    "--data.num_train=648",
    "--data.num_test=1",
    "--data.val_size=20",
    f"--data.batch_size={_BATCH_SIZE}",
    "--trainer.accelerator=cpu",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.log_every_n_steps=10",
    "--trainer.enable_progress_bar=false",
    "--watchdog.timeout_s=5",
)


@dataclass(frozen=True, kw_only=True)
class JobMode:
    """A mode in which processes meet, and what it can be resized to."""

    name: str  # as in `--modes` and `--trainer.strategy`
    # What to pass to `fit` under torchrun, by the number of processes: first at full size, then at those to which a job
    # is resized. All compute the same, with virtual replicas bit for bit, else but for rounding.
    flags: Mapping[int, tuple[str, ...]]
    num_parts: int | None = None  # number of virtual replicas

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of processes."""
        return tuple(self.flags)

    @property
    def num_processes(self) -> int:
        """At full size."""
        return self.sizes[0]


@dataclass(frozen=True)
class Training:
    """A small training."""

    mode: JobMode  # how it is parallelised
    num_epochs: int
    resized: bool = False  # whether it is resized, and compared after that

    @classmethod
    def under(cls, mode: JobMode, num_faults: int, *, resized: bool = False) -> "Training":
        """A training that is long enough for `num_faults` faults."""
        return cls(mode, -(-_STEPS_PER_FAULT * (num_faults + 2) // STEPS_PER_EPOCH), resized)

    @property
    def num_steps(self) -> int:
        return self.num_epochs * STEPS_PER_EPOCH

    @property
    def has_same_bits(self) -> bool:
        """Whether it must end with the bits of the uninterrupted training.

        Else it computes in float64: in float32, uninterrupted trainings on one and on two processes, which round in
        another order, are 0.3 apart in the optimizer's state after 60 steps, so no bound could tell rounding from a
        mistake. In float64 they are 6e-15 apart.
        """
        return not self.resized or self.mode.num_parts is not None

    @property
    def precision(self) -> str:
        return "32-true" if self.has_same_bits else "64-true"

    @property
    def arch(self) -> str:
        """As `--model.arch` takes it: only the disk of the other job is filled, which takes files of some size."""
        return "tiny" if self.resized else "resnet10"

    def arguments(self, size: int, *, run: Path, journal: Path, disturbed: bool = True) -> list[str]:
        """The arguments of `python -m lit_cifar`, of a new and of a resumed run.

        If it is `disturbed`, faults will hit it: it also saves within epochs, and draws figures. Its results must not
        depend on that.
        """
        return [
            "fit",
            *_FLAGS,
            *self.mode.flags[size],
            f"--last_checkpoint.every_n_steps={EVERY_N_STEPS}" if disturbed else "--figures.every_n_epochs=0",
            f"--trainer.max_epochs={self.num_epochs}",
            f"--trainer.precision={self.precision}",
            f"--model.arch={self.arch}",
            f"--run_dir={run}",
            "--resume=auto",
            f"--trainer.callbacks+={JOURNAL}",
            f"--trainer.callbacks.folder={journal}",
        ]


def chosen_modes(names: Sequence[str], *, devices: int, num_parts: int | None = None) -> list[JobMode]:
    """With so many `devices` at full size and, if they are to have the same bits, virtual replicas."""
    if devices < 2:
        raise ConfigError(f"--devices={devices}: chaos needs several processes", remedy="pass --devices 2 or more")
    known = {"ddp": "ddp-sync", "ddp_mp": "ddp_mp", "pp": "pp", "ddp_pp": "ddp_pp", "fsdp2": "fsdp2", "tp": "tp"}
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise ConfigError(
            f"there is no mode {wrong[0]!r} that torchrun starts" if wrong else "no mode is named",
            remedy=f"pass --modes with some of {','.join(known)}",
        )
    with quiet():
        if num_parts is not None:
            return [_with_same_bits(name, devices, num_parts) for name in known if name in names]
        return [_mode(name, variants(devices)[known[name]]) for name in known if name in names]


def _with_same_bits(name: str, devices: int, num_parts: int) -> JobMode:
    """Resized to one process, and where V can be divided so to twice as many in another mode."""
    own, other = f"--virtual_replicas={num_parts}", "ddp" if name == "fsdp2" else "fsdp2"
    full = variants(devices)[name]  # which `fit` refuses if V cannot be divided so
    others = (variants(2)["single"], variants(2 * devices)[other])
    fitting = [variant for variant in others if num_parts % variant.num_processes == 0]
    flags = {variant.num_processes: (own, *variant.with_parts().flags) for variant in (full, *fitting)}
    return JobMode(name=name, flags=flags, num_parts=num_parts)


def _mode(name: str, mode: Variant) -> JobMode:
    if mode.num_processes < 2:
        raise ConfigError(
            f"--modes={name} has one process on {mode.devices} devices", remedy=f"pass --devices {2 * mode.devices}"
        )
    chunks = mode.ghost_batches(accumulation=1)
    separate = (
        [] if chunks == GhostBatches() else [f"--model.ghost_batchnorm.{k}={v}" for k, v in asdict(chunks).items()]
    )
    alone = ("--trainer.strategy=auto", "--trainer.devices=1", *separate)
    return JobMode(name=name, flags={mode.num_processes: tuple(mode.flags), 1: alone})
