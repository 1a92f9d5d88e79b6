"""Steps of the modes beside one another, and beside one process that has all threads."""

from os import cpu_count

from lit_cifar.models import Stem
from lit_cifar.tools.bench.measurements import Row, Settings, Values, interleaved
from lit_cifar.tools.bench.timed_runs import TimedRun, interleaved_runs

_ONE_PROCESS = "auto"
_MODES = {_ONE_PROCESS: 1, "dp": 1, "mp": 1, "ddp": 2, "pp": 2, "fsdp2": 2, "tp": 2}  # strategies and their processes
# Steps of a turn: so many that are timed, after so many that warm the caches up. Those of the CIFAR stem take seconds.
_STEPS: dict[Stem, tuple[int, int]] = {"cifar": (1, 0), "imagenet": (3, 1)}


def measure(settings: Settings) -> list[Row]:
    """Speed of ResNet34 in float32 on the CPU, both stems: each mode on two devices over one process with all threads.

    Raises:
        RuntimeError: A run failed.
    """
    rows = []
    batch_size = 32 if settings.small else 128
    for stem in _STEPS:
        found = _seconds(stem, settings, batch_size)
        alone = found.pop(_ONE_PROCESS)
        about = f"{stem} stem, batch {batch_size}, 32-true"
        rows += [Row(f"speed of {mode} on 2 devices, {about}", "x", alone / own) for mode, own in found.items()]
        name = f"images per second of one process with {cpu_count()} threads, {about}: 1.00x"
        rows.append(Row(name, "img/s", batch_size / alone))
    return rows


def _seconds(stem: Stem, settings: Settings, batch_size: int) -> dict[str, Values]:
    """Of a step of each mode."""
    steps, skip = _STEPS[stem]
    flags = ["--data.dataset=synthetic", f"--data.num_train={batch_size * (4 + settings.rounds * (steps + skip))}"]
    flags += ["--data.val_size=0", f"--data.batch_size={batch_size}", "--trainer.accelerator=cpu"]
    flags += ["--trainer.enable_progress_bar=false", f"--model.arch={settings.arch}", f"--model.stem={stem}"]
    with interleaved_runs({mode: _run(mode, flags) for mode in _MODES}, folder=settings.folder) as seconds:
        for mode in _MODES:  # memory is allocated, kernels are chosen, DDP cuts its buckets
            seconds(mode, steps=1, skip=skip)
        calls = {mode: lambda mode=mode: seconds(mode, steps=steps, skip=skip) for mode in _MODES}
        return interleaved(calls, rounds=settings.rounds)


def _run(mode: str, flags: list[str]) -> TimedRun:
    """With the flags that a user would pass; the threads of its processes share the cores."""
    own = [f"--trainer.strategy={mode}", f"--trainer.devices={1 if mode == _ONE_PROCESS else 2}"]
    threads = max(1, (cpu_count() or 1) // _MODES[mode])
    return TimedRun(flags=[*flags, *own], num_ranks=_MODES[mode], threads=threads)
