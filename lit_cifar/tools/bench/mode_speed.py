"""The speed that `fit` logs in each mode, over that of one process with all threads."""

import csv
import tempfile
from functools import partial
from os import sched_getaffinity
from pathlib import Path

from lit_cifar.models import Stem
from lit_cifar.reporting.progress import METRIC
from lit_cifar.tools.bench import Row, Settings, fit, interleaved

_ONE_PROCESS = "auto"
_MODES = {_ONE_PROCESS: 1, "dp": 1, "mp": 1, "ddp": 2, "pp": 2, "fsdp2": 2, "tp": 2}  # number of processes by strategy
_STEPS: dict[Stem, int] = {"cifar": 2, "imagenet": 4}  # number of timed steps; those of the CIFAR stem take seconds
_WARM_UP = 2  # steps that `fit` does not time


def measure(settings: Settings) -> list[Row]:
    """Speed of ResNet34 in float32 on the CPU: each mode on two devices over one process with all threads."""
    rows = []
    batch_size = 32 if settings.small else 128
    for stem in _STEPS:
        speeds = {mode: partial(speed_of_mode, mode, stem, batch_size, settings) for mode in _MODES}
        found = interleaved(speeds, rounds=settings.rounds)
        alone = found.pop(_ONE_PROCESS)
        about = f"{stem} stem, batch {batch_size}, 32-true"
        rows += [Row(f"speed of {mode} on 2 devices, {about}", "x", own / alone) for mode, own in found.items()]
        threads = f"{len(sched_getaffinity(0))} threads"
        rows.append(Row(f"images per second of one process with {threads}, {about}: 1.00x", "img/s", alone))
    return rows


def speed_of_mode(mode: str, stem: Stem, batch_size: int, settings: Settings) -> float:
    """The speed that `fit` logs over the steps after those that warm up, with the flags that a user would pass.

    The threads of all processes share the cores.
    """
    ranks, steps = _MODES[mode], _WARM_UP + _STEPS[stem]
    words = [f"--model.arch={settings.arch}", f"--model.stem={stem}", f"--trainer.strategy={mode}"]
    words += [f"--trainer.devices={1 if mode == _ONE_PROCESS else 2}", "--trainer.accelerator=cpu"]
    words += [f"--trainer.max_steps={steps}", f"--trainer.log_every_n_steps={steps}", "--trainer.max_epochs=-1"]
    words += ["--data.dataset=synthetic", f"--data.num_train={batch_size * steps}", "--data.val_size=0"]
    words += [f"--data.batch_size={batch_size}", "--trainer.enable_progress_bar=false", "--figures.every_n_epochs=0"]
    with tempfile.TemporaryDirectory(prefix=f"{mode}-", dir=settings.folder) as name:
        folder = Path(name)
        words.append(f"--run_dir={folder / 'run'}")
        fit(words, folder=folder, threads=max(1, len(sched_getaffinity(0)) // ranks), num_ranks=ranks)
        with (folder / "run" / "metrics.csv").open(newline="") as file:
            (speed,) = (row[METRIC] for row in csv.DictReader(file) if row[METRIC])
    return float(speed)
