"""Steps of the modes beside one another, and beside one process that has all threads."""

from os import cpu_count

from lit_cifar.models import Stem
from lit_cifar.tools.bench.measurements import Quantiles, Report, Row, Settings, interleaved, ratio
from lit_cifar.tools.bench.timed_runs import TimedRun, interleaved_runs

_DEVICES = 2
_BATCH = 128
_ONE_PROCESS = "auto"
_MODES = {_ONE_PROCESS: 1, "dp": 1, "mp": 1, "ddp": 2, "pp": 2, "fsdp2": 2, "tp": 2}  # strategies and their processes
# Steps of a turn: so many that are timed, after so many that warm the caches up. Those of the CIFAR stem take seconds.
_STEPS: dict[Stem, tuple[int, int]] = {"cifar": (1, 0), "imagenet": (3, 1)}


def measure(settings: Settings, report: Report) -> list[Row]:
    """Speed of ResNet34 in float32 on the CPU, both stems: each mode on two devices over one process with all threads.

    Raises:
        RuntimeError: A run failed.
    """
    rows = []
    for stem in _STEPS:
        report(f"steps of every mode with the {stem} stem")
        found = _timed(stem, settings)
        alone = found.pop(_ONE_PROCESS)
        about = f"{stem} stem, batch {_batch_size(settings)}, 32-true"
        rows += [
            Row(section="modes", name=f"speed of {mode} on 2 devices, {about}", unit="x", found=ratio(alone, own))
            for mode, own in found.items()
        ]
        per_s = Quantiles(tuple(_batch_size(settings) / seconds for seconds in alone.values))
        name = f"images per second of one process with {cpu_count()} threads, {about}: 1.00x"
        rows.append(Row(section="modes", name=name, unit="img/s", found=per_s))
    return rows


def _timed(stem: Stem, settings: Settings) -> dict[str, Quantiles]:
    """Seconds of a step of each mode."""
    steps, skip = _STEPS[stem]
    runs = {mode: _run(mode, stem, settings) for mode in _MODES}
    with interleaved_runs(runs, folder=settings.folder) as seconds:
        for name in runs:  # memory is allocated, kernels are chosen, DDP cuts its buckets
            seconds(name, steps=1, skip=skip)
        calls = {name: lambda name=name: seconds(name, steps=steps, skip=skip) for name in runs}
        return interleaved(calls, rounds=settings.rounds)


def _run(mode: str, stem: Stem, settings: Settings) -> TimedRun:
    """A run with the flags that a user would pass, long enough for all turns; the threads share the cores."""
    batch_size = _batch_size(settings)
    num_images = batch_size * (4 + settings.rounds * sum(_STEPS[stem]))
    flags = ["--data.dataset=synthetic", f"--data.num_train={num_images}", "--data.val_size=0"]
    flags += [f"--data.batch_size={batch_size}", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    flags += [f"--model.arch={settings.arch}", f"--model.stem={stem}", f"--trainer.strategy={mode}"]
    flags.append(f"--trainer.devices={1 if mode == _ONE_PROCESS else _DEVICES}")
    return TimedRun(flags=flags, num_ranks=_MODES[mode], threads=max(1, (cpu_count() or 1) // _MODES[mode]))


def _batch_size(settings: Settings) -> int:
    return 32 if settings.small else _BATCH
