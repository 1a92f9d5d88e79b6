"""The speed that `fit` logs in each mode, over that of one process with all threads."""

import csv
import tempfile
from collections.abc import Sequence
from functools import partial
from os import cpu_count
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
        speeds = {mode: partial(_speed_of_mode, mode, stem, batch_size, settings) for mode in _MODES}
        found = interleaved(speeds, rounds=settings.rounds)
        alone = found.pop(_ONE_PROCESS)
        about = f"{stem} stem, batch {batch_size}, 32-true"
        rows += [Row(f"speed of {mode} on 2 devices, {about}", "x", own / alone) for mode, own in found.items()]
        rows.append(Row(f"images per second of one process with {cpu_count()} threads, {about}: 1.00x", "img/s", alone))
    return rows


def _speed_of_mode(mode: str, stem: Stem, batch_size: int, settings: Settings) -> float:
    """The speed with the flags that a user would pass; the threads of all processes share the cores."""
    flags = [f"--model.arch={settings.arch}", f"--model.stem={stem}", f"--trainer.strategy={mode}"]
    flags.append(f"--trainer.devices={1 if mode == _ONE_PROCESS else 2}")
    ranks = _MODES[mode]
    threads = max(1, (cpu_count() or 1) // ranks)
    with tempfile.TemporaryDirectory(prefix=f"{mode}-", dir=settings.folder) as own:
        return images_per_s(
            flags, batch_size=batch_size, steps=_STEPS[stem], folder=Path(own), ranks=ranks, threads=threads
        )


def images_per_s(
    flags: Sequence[str], *, batch_size: int, steps: int, folder: Path, ranks: int = 1, threads: int = 1
) -> float:
    """The speed that a `fit` on the CPU, in `ranks` processes, logs over `steps` steps after those that warm up."""
    number = _WARM_UP + steps
    words = [f"--trainer.max_steps={number}", f"--trainer.log_every_n_steps={number}", "--trainer.max_epochs=-1"]
    words += ["--data.dataset=synthetic", f"--data.num_train={batch_size * number}", "--data.val_size=0"]
    words += [f"--data.batch_size={batch_size}", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    words += ["--figures.every_n_epochs=0", f"--run_dir={folder / 'run'}", *flags]
    fit(words, folder=folder, threads=threads, num_ranks=ranks)
    with (folder / "run" / "metrics.csv").open(newline="") as file:
        (speed,) = (float(row[METRIC]) for row in csv.DictReader(file) if row.get(METRIC))
    return speed
