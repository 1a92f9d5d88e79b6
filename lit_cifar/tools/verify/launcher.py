"""Runs of a mode and of one device under one configuration, of which every step is recorded."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os import sched_getaffinity
from pathlib import Path
from typing import Any

import lightning as L

from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.launch.runs import EndedRun
from lit_cifar.launch.signals import EXIT_REFUSED
from lit_cifar.tools.modes import SILENT, SizedMode
from lit_cifar.tools.terminal import say
from lit_cifar.tools.verify.configuration import EXACT, Configuration
from lit_cifar.tools.verify.record import Evaluated, Record, Step
from lit_cifar.tools.verify.recorder import Logits, with_weights
from lit_cifar.tools.verify.runs import ERROR, LIMIT_S, last_words, run


@dataclass(frozen=True)
class Launcher:
    """Runs `fit` under one configuration with every step recorded; prints when a run begins and when it has ended."""

    settings: Configuration
    steps: int  # optimizer steps of every run
    folder: Path  # an existing folder, in which each run gets its own

    def new_folder(self, name: str) -> Path:
        """Make a folder for one run. A step or checkpoint of ResNet34 takes 170 MB: remove it once it has been read."""
        return Path(tempfile.mkdtemp(prefix=f"{name.replace(' ', '-')}-", dir=self.folder))

    def run_mode(self, mode: SizedMode, folder: Path, *, title: str, more: Sequence[str] = ()) -> EndedRun:
        """Run the mode, then resume it before its last step. Return the first that failed, or the last."""
        flags = self.settings.length_flags(steps=self.steps, accumulation=self.settings.accumulation)
        flags += [*mode.flags, *more]
        first = self._fit(title, folder, flags, mode)
        if first.status != 0:
            return first
        record = Record(folder)
        if self.settings.launcher and (started := record.size[0]) != mode.num_processes:
            refusal = f"--launcher has started {started} processes, and {mode.name} with --devices={mode.devices} has "
            refusal += f"{mode.num_processes}\n  have it start as many, or pass other --devices"
            return replace(first, status=EXIT_REFUSED, stderr=ERROR + refusal)
        # The run folder is as before the last step, except for the logs.
        shutil.copytree(record.run, record.resumed.run, ignore=shutil.ignore_patterns("last.ckpt"), copy_function=_link)
        resumed = self._fit(f"{title}, resumed", record.resumed.folder, [*flags, "--resume=auto"], mode)
        # A second run may not refuse what the first one has accepted.
        status = 1 if resumed.status == EXIT_REFUSED else resumed.status
        return replace(resumed, status=status, seconds=first.seconds + resumed.seconds)

    def run_alone(self, title: str, chunks: GhostBatches, *, more: Sequence[str] = ()) -> Record:
        """The record of one device, which normalises `chunks` apart; `more` are further flags.

        Raises a `ConfigError` if it cannot train the configuration, or not to its last step, or not in time.
        """
        flags = self.settings.length_flags(steps=self.steps, accumulation=1)
        flags += ["--trainer.strategy=auto", "--trainer.devices=1", "--trainer.sync_batchnorm=false"]
        if self.settings.num_parts is None:  # otherwise the same kernels must run
            flags += ["--model.channels_last=false", "--model.compile=false"]  # modes may use these, and equal it
        if chunks != GhostBatches():
            flags += [f"--model.ghost_batchnorm.{name}={value}" for name, value in asdict(chunks).items()]
        record = Record(self.new_folder("reference"))
        ended = self._fit(title, record.folder, [*flags, *more])
        if ended.status is None:
            problem = f"one device is too slow for this configuration: {last_words(ended)}"
            raise ConfigError(problem, remedy="pass fewer --steps, or a smaller --data.batch_size or --model.arch")
        if ended.status != 0:
            problem = f"one device cannot train this configuration: {last_words(ended)}"
            raise ConfigError(problem, remedy="correct it until `python -m lit_cifar fit` runs with it")
        if (num_steps := len(record.steps)) < self.steps:
            problem = f"the configuration ends a run after {num_steps} of {self.steps} steps"
            raise ConfigError(problem, remedy="leave out what does, e.g. --trainer.max_time or --trainer.fast_dev_run")
        return record

    def _fit(self, title: str, folder: Path, flags: list[str], mode: SizedMode | None = None) -> EndedRun:
        processes = 1 if mode is None else mode.num_processes
        (folder / "trace").mkdir()
        own = [f"--run_dir={folder / 'run'}", "--trainer.callbacks+=lit_cifar.tools.verify.recorder.Trace"]
        own.append(f"--trainer.callbacks.folder={folder / 'trace'}")
        at_once = self.settings.num_at_once * (self.settings.num_parts or processes)  # bits depend on the threads
        threads = max(1, len(sched_getaffinity(0)) // at_once)
        how: dict[str, Any] = {"folder": folder, "limit_s": LIMIT_S, "threads": threads}
        say(f"running  {title}")
        if self.settings.launcher and mode is not None:  # it starts the processes
            flags = [flag for flag in flags if not flag.startswith("--trainer.devices=")]
            words = [*self.settings.launcher, "fit", *self.settings.flags, *flags, *own]
            ended = run(words, module=None, **how)
        else:
            ranks = 1 if mode is None else mode.num_ranks
            ended = run(["fit", *self.settings.flags, *flags, *own], num_ranks=ranks, **how)
        say(f"{ended.seconds:5.0f} s  {title}")
        return ended


def _link(source: str, target: str) -> None:
    """Link a checkpoint, which is large and replaced as a whole; copy any other file, which is written on."""
    (os.link if source.endswith(".ckpt") else shutil.copy2)(source, target)


def evaluated_alone(step: Step, settings: Configuration) -> tuple[Evaluated, dict[str, float]]:
    """The validation of one device in float64 with the weights of `step`, and its metrics by their logged names."""
    model = settings.config["model"]
    module = settings.module(label_smoothing=model["label_smoothing"], test_views=model["test_views"])
    with_weights(module.network, step)
    callback, names = Logits(), ("accelerator", "limit_val_batches", "overfit_batches")
    how = SILENT | {name: settings.config["trainer"][name] for name in names}
    trainer = L.Trainer(devices=1, precision=EXACT, callbacks=[callback], **how)
    trainer.validate(module, settings.data_module(), verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Evaluated(**callback.take()), metrics
