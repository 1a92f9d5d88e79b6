"""Starts the runs that are compared: of a mode, on its GPUs if there are any, and of one device."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import cpu_count
from pathlib import Path

from lit_cifar.data.batch_split import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.strategies.modes import Variant
from lit_cifar.tools.verify.configuration import Configuration
from lit_cifar.tools.verify.record import Record
from lit_cifar.tools.verify.runs import REFUSED, TIMEOUT_S, Outcome, quiet, run

TRACE = "lit_cifar.tools.verify.recorder.Trace"

Report = Callable[[str], None]


@dataclass(frozen=True)
class Launcher:
    """Runs `fit` under one configuration, and has every step recorded."""

    settings: Configuration
    steps: int  # optimizer steps of every run
    folder: Path  # exists; each run gets a folder of its own in it
    report: Report  # called with a line whenever a run begins, and when it has ended
    timeout_s: float = TIMEOUT_S  # after which a run is stopped, and has failed

    def new_folder(self, name: str) -> Path:
        """For one run. A step or checkpoint of ResNet34 takes 170 MB: remove it as soon as it has been read."""
        return Path(tempfile.mkdtemp(prefix=f"{name.replace(' ', '-')}-", dir=self.folder))

    def run_mode(self, mode: Variant, folder: Path, *, title: str, more: Sequence[str] = ()) -> Outcome:
        """Run the mode in `folder`, with further flags; then resume it before its last step.

        The outcome is that of the run that has failed, if one has.
        """
        flags = self.settings.length_flags(steps=self.steps, accumulation=self.settings.accumulation)
        flags += [*mode.flags, *more]
        with quiet():
            processes, ranks = mode.num_processes, mode.num_ranks
        fit = partial(self._fit, processes=processes, ranks=ranks)
        replay = []
        if not self.settings.is_exact:  # where bounds are measured, and wide
            replay = ["--trainer.callbacks+=lit_cifar.Replay", f"--trainer.callbacks.steps={self.steps}"]
        first = fit(title, folder, [*flags, *replay])
        if first.status != 0:
            return first
        again = _with_checkpoint_before_last_step(Record(folder))
        resumed = fit(f"{title}, resumed", again, [*flags, "--resume=auto"])
        # What the first run has accepted, no second one may refuse.
        status = 1 if resumed.status == REFUSED else resumed.status
        return replace(resumed, status=status, seconds=first.seconds + resumed.seconds)

    def run_alone(
        self,
        title: str,
        folder: Path,
        chunks: GhostBatches,
        trace: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        """Run one device in `folder`, which normalises `chunks` apart, with further arguments of `Trace` and flags.

        Raises a `ConfigError` if it cannot train the configuration, or not to its last step, or not in time.
        """
        flags = [*self.settings.length_flags(steps=self.steps, accumulation=1), *more]
        flags += ["--trainer.strategy=auto", "--trainer.devices=1", "--trainer.sync_batchnorm=false"]
        if self.settings.num_parts is None:  # else the same kernels must run
            flags += ["--model.channels_last=false", "--model.compile=false"]  # which the modes are to show equal to it
        if chunks != GhostBatches():
            flags += [f"--model.ghost_batchnorm.{name}={value}" for name, value in asdict(chunks).items()]
        outcome = self._fit(title, folder, flags, trace)
        if outcome.status is None:
            raise ConfigError(
                f"one device is too slow for this configuration: {outcome.last_words}",
                remedy="pass fewer --steps, or a smaller --data.batch_size or --model.arch",
            )
        if outcome.status != 0:
            raise ConfigError(
                f"one device cannot train this configuration: {outcome.last_words}",
                remedy="correct it until `python -m lit_cifar fit` runs with it",
            )
        if (num_steps := len(Record(folder).steps)) < self.steps:
            raise ConfigError(
                f"the configuration ends a run after {num_steps} of {self.steps} steps",
                remedy="leave out what does, e.g. --trainer.max_time or --trainer.fast_dev_run",
            )

    def _fit(
        self,
        title: str,
        folder: Path,
        flags: list[str],
        trace: Mapping[str, str] | None = None,
        *,
        processes: int = 1,
        ranks: int = 1,
    ) -> Outcome:
        (folder / "trace").mkdir()
        arguments = {"folder": str(folder / "trace"), **(trace or {})}
        recording = [f"--trainer.callbacks+={TRACE}"]
        recording += [f"--trainer.callbacks.{name}={value}" for name, value in arguments.items()]
        self.report(f"running  {title}")
        outcome = run(
            "fit",
            *self.settings.flags,
            *flags,
            f"--run_dir={folder / 'run'}",
            *recording,
            folder=folder,
            threads=max(1, (cpu_count() or 1) // (processes * self.settings.num_at_once)),
            timeout_s=self.timeout_s,
            num_ranks=ranks,
        )
        self.report(f"{outcome.seconds:5.0f} s  {title}")
        return outcome


def _with_checkpoint_before_last_step(record: Record) -> Path:
    """A folder with a copy of the run as it was when it had not made its last step, but for what it has logged."""
    folder = record.resumed.folder
    shutil.copytree(record.run, record.resumed.run, ignore=shutil.ignore_patterns("last.ckpt"), copy_function=_link)
    return folder


def _link(source: str, target: str) -> None:
    """Checkpoints are large, and are replaced as a whole; other files are written on."""
    (os.link if source.endswith(".ckpt") else shutil.copy2)(source, target)


# Where a mode runs: each part on a GPU of its own, or several parts on one --------------------------------------------

# Communication that a mode needs and gloo lacks for tensors on a GPU; NCCL refuses two processes on one GPU.
_NOT_SHARED = {
    "pp": "sends activations from one to the other",
    "ddp_pp": "sends activations from one to the other",
    "fsdp2": "averages parts of gradients",
    "fsdp2-tp": "averages parts of gradients",
}

# The class that stands for a mode on one GPU, and its sizes for so many devices. All others are `ddp` with its samples.
_Sizes = Callable[[int], dict[str, int | str]]
_SHARED: dict[str, tuple[str, _Sizes]] = {
    "dp": ("DataParallelStrategy", lambda n: {"num_replicas": n}),
    "mp": ("LayerParallelStrategy", lambda n: {"num_stages": n, "num_microbatches": 1}),
    "mp-micro": ("LayerParallelStrategy", lambda n: {"num_stages": n}),
    "ddp_mp": ("OneDeviceDDPLayerParallelStrategy", lambda n: {"num_devices": n}),
    "ddp_spawn": ("OneDeviceDDPStrategy", lambda n: {"num_devices": n, "start_method": "spawn"}),
    "tp": (
        "OneDeviceShardedStrategy",
        lambda n: {"num_devices": n, "data_parallel_size": 1, "tensor_parallel_size": n},
    ),
}


def placed(mode: Variant, *, num_gpus: int) -> Variant:
    """`mode` on at most `num_gpus` GPUs; as it is on the CPU, where there are 0, and where they suffice."""
    if num_gpus == 0 or mode.devices <= num_gpus:
        return mode
    if mode.name in _NOT_SHARED:
        raise ConfigError(
            f"{mode.name} on {mode.devices} devices {_NOT_SHARED[mode.name]}, which processes on one GPU cannot; "
            f"GPUs here: {num_gpus}",
            remedy="leave it out, or pass --trainer.accelerator=cpu",
        )
    strategy, sizes = _SHARED.get(mode.name, ("OneDeviceDDPStrategy", lambda n: {"num_devices": n}))
    return replace(mode, strategy=strategy, sizes=sizes(mode.devices) | mode.sizes, devices=1)
