"""The training that is hit: which modes, which flags, how long."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.batch_split import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.strategies.modes import Variant, variants
from lit_cifar.tools.verify.runs import quiet, refuse_if_invalid, run

SAMPLE_LOG = "lit_cifar.tools.chaos.sample_log.SampleLog"

EVERY_N_STEPS = 4
ANEW_EVERY = 4
_STEPS_PER_FAULT = 8  # beyond the few that are repeated after one

# A small training. The last batch of an epoch has 20 images, which divide among two replicas of two microbatches.
_SMALL = (
    "--model.arch=resnet10",
    "--model.stem=imagenet",
    "--model.optimizer.lr=1e-4",
    "--data.dataset=synthetic",
    "--data.num_train=648",
    "--data.num_test=1",
    "--data.val_size=20",
    "--data.batch_size=32",
    "--trainer.log_every_n_steps=10",
)
_OURS = (
    "--trainer.accelerator=cpu",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.enable_progress_bar=false",
    "--watchdog.timeout_s=5",
)
_OWNED = {"trainer.strategy", "trainer.devices", "trainer.max_epochs", "trainer.max_steps", "trainer.sync_batchnorm"}
_OWNED |= {"run_dir", "resume", "ckpt_path", "virtual_replicas", "last_checkpoint.every_n_steps"}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What is trained: flags of `fit`, and what follows from them."""

    flags: tuple[str, ...]
    steps_per_epoch: int
    precision: str  # as `--trainer.precision`

    @classmethod
    def of(cls, args: Sequence[str], *, folder: Path) -> "Configuration":
        """Of the user's flags of `fit`; without `--config` they change a small training.

        Raises:
            ConfigError: `fit` refuses them, or `chaos` sets one of them itself.
        """
        for name in (arg.partition("=")[0].removeprefix("--") for arg in args):
            if name in _OWNED:
                raise ConfigError(f"chaos sets --{name} itself", remedy="leave it out; see --modes and --devices")
        has_file = any(arg.partition("=")[0] in ("--config", "-c") for arg in args)
        flags = (*(() if has_file else _SMALL), *args, *_OURS)
        outcome = run("fit", *flags, "--print_config", folder=folder)
        refuse_if_invalid(outcome)
        config = yaml.safe_load(outcome.stdout)
        data = CIFAR10DataModule(**config["data"])
        data.prepare_data()
        data.setup("fit")
        steps, limit = data.train_sampler().num_batches, config["trainer"]["limit_train_batches"]
        if limit not in (None, 1.0):
            raise ConfigError(
                f"--trainer.limit_train_batches={limit}: chaos counts every sample of an epoch",
                remedy="leave it out, and take fewer images: --data.num_train=640",
            )
        return cls(flags=flags, steps_per_epoch=steps, precision=str(config["trainer"]["precision"] or "32-true"))


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
    """A training that is hit."""

    configuration: Configuration
    mode: JobMode  # how it is parallelised
    num_epochs: int
    resized: bool = False  # whether it is resized, and compared after that

    @classmethod
    def under(
        cls, configuration: Configuration, mode: JobMode, num_faults: int, *, resized: bool = False
    ) -> "Training":
        """A training that is long enough for `num_faults` faults."""
        num_epochs = -(-_STEPS_PER_FAULT * (num_faults + 2) // configuration.steps_per_epoch)
        return cls(configuration, mode, num_epochs, resized)

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.configuration.steps_per_epoch

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
        return self.configuration.precision if self.has_same_bits else "64-true"

    def arguments(self, size: int, *, run: Path, sample_log: Path, has_faults: bool = True) -> list[str]:
        """The arguments of `python -m lit_cifar`, of a new and of a resumed run.

        If it `has_faults` it also saves within epochs, and draws figures. Its results must not depend on that.
        """
        return [
            "fit",
            *self.configuration.flags,
            *self.mode.flags[size],
            f"--last_checkpoint.every_n_steps={EVERY_N_STEPS}" if has_faults else "--figures.every_n_epochs=0",
            f"--trainer.max_epochs={self.num_epochs}",
            f"--trainer.precision={self.precision}",
            f"--run_dir={run}",
            "--resume=auto",
            f"--trainer.callbacks+={SAMPLE_LOG}",
            f"--trainer.callbacks.folder={sample_log}",
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
