"""What `fit` adds to a training: to a step, to an epoch, and before the first step."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from os import cpu_count
from pathlib import Path
from time import perf_counter
from typing import Any

from lit_cifar.bench import epochs, plain_loop
from lit_cifar.bench.random_cifar10 import write_random_cifar10
from lit_cifar.bench.rows import Goal, Row
from lit_cifar.bench.settings import Report, Settings
from lit_cifar.bench.timing import Spread, difference, measured_in_turn
from lit_cifar.verify.runs import run

_TURNS_PER_ROUND = 6
_STEPS_PER_TURN = 50
_STEPS_OF_AN_EPOCH = 45_000 / 128
_ENOUGH_EPOCHS = 8


def measure(settings: Settings, report: Report) -> list[Row]:
    """A step, an epoch and a start, on the CPU, with all that a run logs and saves by default.

    Raises:
        RuntimeError: A run failed.
    """
    data = settings.folder / "overhead"
    write_random_cifar10(data)
    arguments = settings, report, ["fit", f"--data.root={data}", "--trainer.accelerator=cpu", "--trainer.devices=1"]
    epoch, step_s = _epoch(*arguments)
    return [*_steps(*arguments, resnet34_s=step_s), epoch, _start(*arguments)]


def _steps(settings: Settings, report: Report, fit: list[str], *, resnet34_s: float) -> list[Row]:
    """Against a plain loop; `resnet34_s` are the seconds of a step of ResNet34."""
    report("overhead of a step")
    steps = _STEPS_PER_TURN * ((1 if settings.small else _TURNS_PER_ROUND) * settings.rounds + 3)
    flags = [f"--model.network={plain_loop.__name__}.Small", "--data.batch_size=16", "--data.val_size=0"]
    flags += [f"--trainer.max_steps={steps}", "--trainer.max_epochs=-1"]
    turns = _run([*fit, *flags], settings, callback=f"{plain_loop.__name__}.InTurn", threads=1)
    by_clock, of_processor = ([turn[clock] for turn in turns] for clock in (0, 1))
    row = partial(Row, section="overhead")
    plain_us = Spread(tuple(1e6 * plain for _, plain in by_clock)).median
    found = Spread(tuple(1e6 * (own - plain) for own, plain in by_clock))
    name = "a step of fit, with all logs, over a plain PyTorch loop"
    return [
        row(
            name=f"{name}, a network of one layer",
            unit="us",
            found=found,
            goal=Goal(at_most=250),
            note=f"the plain loop takes {plain_us:,.0f} us a step",
        ),
        row(
            name=f"{name}, a network of one layer, in processor time",
            unit="us",
            found=Spread(tuple(1e6 * (own - plain) for own, plain in of_processor)),
            note="which other programs on the machine change less",
        ),
        row(
            name="the same as a share of a step of ResNet34, imagenet stem, batch 128",
            unit="%",
            found=Spread(tuple(1e-6 * us / resnet34_s for us in found.values)),
            goal=Goal(at_most=0.005),
            note=f"which takes {resnet34_s * 1e3:,.0f} ms",
        ),
    ]


def _epoch(settings: Settings, report: Report, fit: list[str]) -> tuple[Row, float]:
    """The share of an epoch that is neither a training nor a validation step, and the seconds of a training step.

    Epochs of few steps, of which the steps of a whole one are computed.
    """
    report("overhead of an epoch")
    num_epochs = 3 if settings.small else min(settings.rounds + 2, _ENOUGH_EPOCHS)
    flags = [f"--model.arch={'tiny' if settings.small else 'resnet34'}", "--model.stem=imagenet"]
    flags += ["--data.eval_batch_size=100"]
    flags += ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1", f"--trainer.max_epochs={num_epochs}"]
    threads = cpu_count() or 1
    times = _run([*fit, *flags], settings, callback=f"{epochs.__name__}.EpochTimes", threads=threads)
    outside = Spread(tuple(times["outside_s"]))
    whole_s = times["step_s"] * _STEPS_OF_AN_EPOCH
    row = Row(
        section="overhead",
        name="an epoch outside of training and validation steps, ResNet34, imagenet stem, 45,000 images",
        unit="%",
        found=Spread(tuple(seconds / (whole_s + seconds) for seconds in outside.values)),
        goal=Goal(at_most=0.02),
        note=f"{outside.median * 1e3:,.0f} ms beside steps of {whole_s:.0f} s; files are written behind them",
    )
    return row, float(times["step_s"])


def _start(settings: Settings, report: Report, fit: list[str]) -> Row:
    report("the start of a run")
    imports = ["-c", "import os, torch, lightning.pytorch; os._exit(0)"]
    arch = ["--model.arch=tiny", "--model.stem=imagenet"] if settings.small else []

    def seconds(arguments: list[str]) -> float:
        folder = Path(tempfile.mkdtemp(prefix="start", dir=settings.folder))
        start = perf_counter()
        outcome = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=with_package(os.environ), capture_output=True
        )
        if outcome.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed: {outcome.stderr.decode(errors='replace')[-2000:]}")
        return perf_counter() - start

    first_step = ["-m", "lit_cifar", *fit, *arch, f"--trainer.callbacks+={epochs.__name__}.EndAtFirstStep"]
    found = measured_in_turn(
        {"imports": partial(seconds, imports), "fit": partial(seconds, first_step)}, rounds=settings.rounds
    )
    return Row(
        section="overhead",
        name="from the start of fit to the first step, beyond importing torch and Lightning, ResNet34",
        unit="s",
        found=difference(found["fit"], found["imports"]),
        goal=Goal(at_most=1.0),
        note=f"the imports alone take {found['imports'].median:.1f} s; fit makes them without garbage collection",
    )


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with this package on Python's path, wherever a new process is started."""
    package = str(Path(__file__).parents[2])
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH", "")]))}


def _run(words: list[str], settings: Settings, *, callback: str, threads: int) -> Any:
    """What the callback of a run has written."""
    folder = Path(tempfile.mkdtemp(prefix="fit", dir=settings.folder))
    file = folder / "found.json"
    flags = [f"--run_dir={folder / 'run'}", f"--trainer.callbacks+={callback}", f"--trainer.callbacks.file={file}"]
    outcome = run(*words, *flags, folder=folder, threads=threads)
    if outcome.status != 0:
        raise RuntimeError(f"{' '.join(words)} failed: {outcome.last_words}")
    return json.loads(file.read_text())
