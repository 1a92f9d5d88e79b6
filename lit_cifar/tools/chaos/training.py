"""The training that is hit: its modes, flags and length."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.tools.chaos.faults import Fault, schedule_faults
from lit_cifar.tools.modes import SizedMode, sized_modes
from lit_cifar.tools.terminal import names_config, refuse_owned, without_devices
from lit_cifar.tools.verify.launcher import Configuration
from lit_cifar.tools.verify.runs import OWNED, resolved

_EVERY_N_STEPS = 4
_STEPS_PER_FAULT = 8  # steps between faults, more than the few that are repeated after one

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


def configured(args: Sequence[str], *, folder: Path, must_draw_alike: bool = False) -> tuple[tuple[str, ...], str, int]:
    """The flags of `fit`, by default of a small training, their precision and the steps between saves.

    A network that draws random numbers is refused where the training on one process must draw as on several.
    """
    refuse_owned(args, OWNED | {"virtual_replicas"}, command="chaos")
    flags = (*(() if names_config(args) else _SMALL), *args, *_OURS)
    config = resolved(flags, folder=folder)
    if (accumulation := config["trainer"]["accumulate_grad_batches"]) > 1:
        raise ConfigError(
            f"--trainer.accumulate_grad_batches={accumulation}: BatchNorm would see other parts of a batch on fewer "
            "processes, and chaos compares the ends",
            remedy="pass --trainer.accumulate_grad_batches=1",
        )
    if must_draw_alike and Configuration(flags, config).draws_random_numbers:
        raise ConfigError(
            "the network draws random numbers, as dropout does, and a resized job draws others",
            remedy="pass --virtual_replicas=4, with which each number of processes draws the same; or --kills",
        )
    every_n_steps = config["last_checkpoint"]["every_n_steps"] or _EVERY_N_STEPS
    return flags, str(config["trainer"]["precision"] or "32-true"), every_n_steps


@dataclass(frozen=True, kw_only=True)
class ResizedMode:
    name: str  # its name in `--modes` and `--trainer.strategy`
    # Flags of `fit` under torchrun, by the number of processes: the full size first, then those to which a job is
    # resized. All compute the same, with virtual replicas bit for bit, otherwise except for rounding.
    flags: Mapping[int, tuple[str, ...]]
    num_parts: int | None = None  # number of virtual replicas

    @property
    def num_processes(self) -> int:
        """Number of processes at full size."""
        return next(iter(self.flags))


@dataclass(frozen=True)
class Training:
    flags: tuple[str, ...]  # flags of `fit`
    own_precision: str  # their `--trainer.precision`
    mode: ResizedMode  # mode of the training
    num_faults: int
    every_n_steps: int = _EVERY_N_STEPS  # optimizer steps between saves
    resized: bool = False  # whether the training is resized, and compared after that
    launcher: tuple[str, ...] = ()  # the words before `fit` of a launcher; by default torchrun
    kills_alone: bool = False  # whether all faults are kills

    @property
    def num_steps(self) -> int:
        return max(_STEPS_PER_FAULT, 2 * self.every_n_steps) * (self.num_faults + 2)

    @property
    def has_same_bits(self) -> bool:
        """Whether the training must end with the bits of the uninterrupted one.

        If not, it computes in float64: in float32, uninterrupted trainings on one and on two processes, which round in
        a different order, are 0.3 apart in the optimizer's state after 60 steps, so no bound could tell rounding from a
        mistake. In float64 they are 6e-15 apart.
        """
        return not self.resized or self.mode.num_parts is not None

    @property
    def precision(self) -> str:
        return self.own_precision if self.has_same_bits else "64-true"

    def faults(self, *, seed: int, full_disk: bool = True) -> list[Fault]:
        """The faults of the training, from its second checkpoint on until shortly before its end."""
        return schedule_faults(
            self.num_faults,
            seed=seed,
            sizes=[*self.mode.flags] if self.resized else [self.mode.num_processes],
            first_step=2 * self.every_n_steps + 2,
            last_step=self.num_steps - 2 * self.every_n_steps,
            full_disk=full_disk,
            nodes="ray" in self.launcher,
            kills_alone=self.kills_alone,
        )

    def arguments(self, size: int, *, folder: Path, has_faults: bool = True) -> list[str]:
        """The arguments of `python -m lit_cifar`, of a new and of a resumed run.

        A run that `has_faults` also saves within epochs, and draws figures. Its results must not depend on that.
        """
        return [
            "fit",
            *self.flags,
            *(without_devices(self.mode.flags[size]) if self.launcher else self.mode.flags[size]),
            f"--last_checkpoint.every_n_steps={self.every_n_steps}" if has_faults else "--figures.every_n_epochs=0",
            "--trainer.max_epochs=-1",
            f"--trainer.max_steps={self.num_steps}",
            f"--trainer.precision={self.precision}",
            f"--run_dir={folder / 'run'}",
            "--resume=auto",
            "--trainer.callbacks+=lit_cifar.tools.chaos.audit.SampleLog",
            f"--trainer.callbacks.folder={folder / 'sample_log'}",
        ]


def chosen_modes(names: Sequence[str], *, devices: int, num_parts: int | None = None) -> list[ResizedMode]:
    """The modes with `devices` at full size and, if they are to have the same bits, virtual replicas."""
    if devices < 2:
        raise ConfigError(f"--devices={devices}: chaos needs several processes", remedy="pass --devices 2 or more")
    known = {"ddp": "ddp-sync", "ddp_mp": "ddp_mp", "pp": "pp", "ddp_pp": "ddp_pp", "fsdp2": "fsdp2", "tp": "tp"}
    if wrong := [name for name in names if name not in known]:
        problem = f"there is no mode {wrong[0]!r} that torchrun starts"
        raise ConfigError(problem, remedy=f"pass --modes with some of {','.join(known)}")
    full = {
        name: sized_modes(devices)[of if num_parts is None else name] for name, of in known.items() if name in names
    }
    for name, mode in full.items():
        if mode.num_processes < 2:
            problem = f"--modes={name} has one process on {mode.devices} devices"
            raise ConfigError(problem, remedy=f"pass --devices {2 * mode.devices}")
    if num_parts is not None:
        return [_with_same_bits(name, mode, devices, num_parts) for name, mode in full.items()]
    return [_mode(name, mode) for name, mode in full.items()]


def _with_same_bits(name: str, full: SizedMode, devices: int, num_parts: int) -> ResizedMode:
    """The mode resized to one process, and to twice as many in another mode where V can be divided so."""
    own, other = f"--virtual_replicas={num_parts}", "ddp" if name == "fsdp2" else "fsdp2"
    # `fit` refuses the mode if V cannot be divided so.
    others = (sized_modes(2)["single"], sized_modes(2 * devices)[other])
    fitting = [mode for mode in others if num_parts % mode.num_processes == 0]
    flags = {mode.num_processes: (own, *mode.with_parts().flags) for mode in (full, *fitting)}
    return ResizedMode(name=name, flags=flags, num_parts=num_parts)


def _mode(name: str, mode: SizedMode) -> ResizedMode:
    alone = ["--trainer.strategy=auto", "--trainer.devices=1"]
    if (chunks := mode.ghost_batches(accumulation=1)) != GhostBatches():
        alone += [f"--model.ghost_batchnorm.{name}={value}" for name, value in asdict(chunks).items()]
    return ResizedMode(name=name, flags={mode.num_processes: tuple(mode.flags), 1: tuple(alone)})
