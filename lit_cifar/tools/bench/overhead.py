"""What `fit` adds to a training: to a step, to an epoch, and before the first step."""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from os import cpu_count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from lit_cifar.data.cifar10 import CLASSES, FILES, RECORD_BYTES, RECORDS_PER_FILE
from lit_cifar.data.download import CIFAR10_BINARY
from lit_cifar.tools.bench import plain_loop
from lit_cifar.tools.bench.measurements import Quantiles, Report, Row, Settings, difference, interleaved
from lit_cifar.tools.verify.runs import run

_TURNS_PER_ROUND = 6
_STEPS_PER_TURN = 50
_STEPS_OF_AN_EPOCH = 45_000 / 128
_ENOUGH_EPOCHS = 8


def measure(settings: Settings, report: Report) -> list[Row]:
    """A step, an epoch and a start, with all that a run logs and saves by default.

    Raises:
        RuntimeError: A run failed.
    """
    data = settings.folder / "overhead"
    write_random_cifar10(data)
    accelerator = "gpu" if settings.device.type == "cuda" else "cpu"
    fit = ["fit", f"--data.root={data}", f"--trainer.accelerator={accelerator}", "--trainer.devices=1"]
    arguments = settings, report, fit
    return [*_one_layer(*arguments), _resnet34(*arguments), _epoch(*arguments), _start(*arguments)]


def _one_layer(settings: Settings, report: Report, fit: list[str]) -> list[Row]:
    """All that is not the network: microseconds over a plain loop."""
    report("overhead of a step")
    rounds = (1 if settings.small else _TURNS_PER_ROUND) * settings.rounds
    flags = [f"--model.network={plain_loop.__name__}.Small", "--data.batch_size=16"]
    turns = _beside_a_plain_loop([*fit, *flags], settings, turns=rounds, steps=_STEPS_PER_TURN, threads=1)
    by_clock, of_processor = ([turn[clock] for turn in turns] for clock in (0, 1))
    plain_us = Quantiles(tuple(1e6 * plain for _, plain in by_clock)).median
    name = "a step of fit, with all logs, over a plain PyTorch loop, a network of one layer"
    row = partial(Row, section="overhead", unit="us")
    return [
        row(name=name, found=_added_us(by_clock), note=f"the plain loop takes {plain_us:,.0f} us a step"),
        row(
            name=f"{name}, in processor time",
            found=_added_us(of_processor),
            note="which other programs on the machine change less",
        ),
    ]


def _resnet34(settings: Settings, report: Report, fit: list[str]) -> Row:
    """A step of `fit` over one of a plain loop, both in the same precision and layout."""
    report("a step of fit and of a plain loop")
    on_gpu = settings.device.type == "cuda"
    stem, batch_size, precision = ("cifar", 512, "bf16-mixed") if on_gpu else ("imagenet", 128, "32-true")
    flags = [f"--model.arch={settings.arch}", f"--model.stem={stem}", f"--data.batch_size={batch_size}"]
    flags += [f"--trainer.precision={precision}", f"--model.channels_last={str(on_gpu).lower()}"]
    flags += ["--trainer.log_every_n_steps=3"]
    turns = _beside_a_plain_loop(
        [*fit, *flags], settings, turns=settings.rounds, steps=30 if on_gpu else 3, threads=cpu_count() or 1
    )
    layout = "channels_last" if on_gpu else "torch's own layout"
    return Row(
        section="overhead",
        name=f"time of a step of fit over that of a plain loop, ResNet34, {stem} stem, batch {batch_size}, "
        f"{precision}, {layout}",
        unit="x",
        found=Quantiles(tuple(own / plain for (own, plain), _ in turns)),
        note=f"the plain loop takes {1e3 * Quantiles(tuple(plain for (_, plain), _ in turns)).median:,.0f} ms a step",
    )


def _beside_a_plain_loop(words: list[str], settings: Settings, *, turns: int, steps: int, threads: int) -> Any:
    """As `InTurn` writes it: for each turn the seconds of a step of both, by the clock and of processor time."""
    flags = ["--data.val_size=0", f"--trainer.max_steps={steps * (turns + 3)}", "--trainer.max_epochs=-1"]
    flags += [f"--trainer.callbacks+={plain_loop.__name__}.InTurn", f"--trainer.callbacks.steps={steps}"]
    return _run([*words, *flags], settings, threads=threads)


def _added_us(turns: list[list[float]]) -> Quantiles:
    return Quantiles(tuple(1e6 * (own - plain) for own, plain in turns))


def _epoch(settings: Settings, report: Report, fit: list[str]) -> Row:
    """The share of an epoch that is neither a training nor a validation step.

    Epochs of few steps, of which the steps of a whole one are computed.
    """
    report("overhead of an epoch")
    num_epochs = 3 if settings.small else min(settings.rounds + 2, _ENOUGH_EPOCHS)
    flags = [f"--model.arch={settings.arch}", "--model.stem=imagenet", "--data.eval_batch_size=100"]
    flags += ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1", f"--trainer.max_epochs={num_epochs}"]
    flags.append(f"--trainer.callbacks+={plain_loop.__name__}.EpochTimes")
    times = _run([*fit, *flags], settings, threads=cpu_count() or 1)
    outside = Quantiles(tuple(times["outside_s"]))
    whole_s = times["step_s"] * _STEPS_OF_AN_EPOCH
    return Row(
        section="overhead",
        name="an epoch outside of training and validation steps, ResNet34, imagenet stem, 45,000 images",
        unit="%",
        found=Quantiles(tuple(seconds / (whole_s + seconds) for seconds in outside.values)),
        note=f"{outside.median * 1e3:,.0f} ms beside steps of {whole_s:.0f} s; files are written behind them",
    )


def _start(settings: Settings, report: Report, fit: list[str]) -> Row:
    report("the start of a run")
    imports = ["-c", "import os, torch, lightning.pytorch; os._exit(0)"]
    arch = [f"--model.arch={settings.arch}", "--model.stem=imagenet"]

    package = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(package)}

    def seconds(arguments: list[str]) -> float:
        folder = Path(tempfile.mkdtemp(prefix="start", dir=settings.folder))
        start = perf_counter()
        outcome = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True)
        if outcome.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed: {outcome.stderr.decode(errors='replace')[-2000:]}")
        return perf_counter() - start

    first_step = ["-m", "lit_cifar", *fit, *arch, f"--trainer.callbacks+={plain_loop.__name__}.EndAtFirstStep"]
    found = interleaved(
        {"imports": partial(seconds, imports), "fit": partial(seconds, first_step)}, rounds=settings.rounds
    )
    return Row(
        section="overhead",
        name="from the start of fit to the first step, beyond importing torch and Lightning, ResNet34",
        unit="s",
        found=difference(found["fit"], found["imports"]),
        note=f"{found['fit'].median:.1f} s in all, the imports alone {found['imports'].median:.1f} s; fit makes them "
        "without garbage collection",
    )


def write_random_cifar10(root: Path) -> None:
    """Write noise with labels in turn, as the binary edition of CIFAR-10 (180 MB), below `root`."""
    folder = root / CIFAR10_BINARY.folder
    folder.mkdir(parents=True)
    records = np.random.default_rng(0).integers(0, 256, (RECORDS_PER_FILE, RECORD_BYTES), np.uint8)
    records[:, 0] = np.arange(RECORDS_PER_FILE) % len(CLASSES)
    for names in FILES.values():
        for name in names:
            records.tofile(folder / name)


def _run(words: list[str], settings: Settings, *, threads: int) -> Any:
    """What the callback that `words` name last has written into its `file`."""
    folder = Path(tempfile.mkdtemp(prefix="fit", dir=settings.folder))
    file = folder / "found.json"
    flags = [f"--run_dir={folder / 'run'}", f"--trainer.callbacks.file={file}"]
    outcome = run(*words, *flags, folder=folder, threads=threads)
    if outcome.status != 0:
        raise RuntimeError(f"{' '.join(words)} failed: {outcome.last_words}")
    return json.loads(file.read_text())
