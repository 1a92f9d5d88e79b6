"""The lines that a run prints about itself: settings at the start, folder and next commands at the end."""

import json
import os
import shlex
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.errors import printable
from lit_cifar.mode import Layout, mode_of
from lit_cifar.reporting.environment import environment
from lit_cifar.reporting.evaluation_tables import datamodule_of
from lit_cifar.reporting.output import leave_out_banners, outlast_streams
from lit_cifar.reporting.predictions import PREDICTIONS
from lit_cifar.reporting.run_folder import run_folder

FILE_NAME = "environment.json"


class RunReport(Callback):
    """Writes `environment.json`, and prints on rank 0 a summary after a run.

    It is the result, the run folder, and commands to look at it and to test its checkpoint. A failed run prints none.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._resumes = False  # whether the folder is of a run that has begun before
        self._started_at = 0.0
        self._pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare the terminal of a spawned process like the parent's: this callback is unpickled first."""
        self.__dict__.update(state)
        if self._pid != os.getpid():
            outlast_streams()
            leave_out_banners()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._started_at = perf_counter()
        self._folder = run_folder(trainer)
        self._resumes = self._folder is not None and (self._folder / FILE_NAME).exists()
        if not self._resumes:  # an existing file belongs to the run's first stage
            self._write_environment(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the environment at the first step of a resumed run, as its settings are."""
        if self._resumes:
            self._write_environment(trainer)

    def _write_environment(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and self._folder is not None:
            found = environment(trainer, data_name=datamodule_of(trainer).name)
            (self._folder / FILE_NAME).write_text(json.dumps(found, indent=2) + "\n")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the result; Lightning calls this only if nothing failed."""
        if not trainer.is_global_zero:
            return
        lines, data = [], datamodule_of(trainer)
        if stage == "fit":
            duration = timedelta(seconds=round(perf_counter() - self._started_at))
            lines.append(_line("result", ", ".join([*results(trainer), f"took {duration}"])))
        if data.name == "synthetic" and stage != "predict":  # as `Synthetic` is called
            lines.append(_line("note", "these images are synthetic: the accuracy says nothing about real ones"))
        if self._folder is not None:
            tests = stage == "fit" and data.source.has_test and (self._folder / "checkpoints").exists()
            lines += next_steps(self._folder, stage, tests=tests)
        if stage == "predict":
            lines += _unread(data)
        print(*map(printable, lines), sep="\n", flush=True)


def announce(
    trainer: Trainer,
    pl_module: LightningModule,
    datamodule: Any,
    *,
    stage: str,
    folder: Path | None,
    checkpoint: str | None,
    choice: str,
) -> None:
    """Print the settings of a run on rank 0, before its processes meet; `setup` of the data module was called.

    `choice` says what the user has left open and this machine has decided.
    """
    if stage == "fit":
        lines = opening_lines(trainer, pl_module, datamodule)
        lines += [_line("precision", choice)] if choice else []
        lines += [] if folder is None else [_line("run folder", shown(folder))]
    else:
        lines = [_line(stage, str(checkpoint)), *_evaluated(datamodule), _mode(trainer)]
    print(*map(printable, lines), sep="\n", flush=True)


def opening_lines(trainer: Trainer, module: Any, datamodule: Any) -> list[str]:
    """Model, data, batch, mode, length and optimizer of a fit, a line each, and the lines of `Mode.split_lines()`.

    This is called on rank 0 alone, before `Strategy.setup`: `split_lines()` may not communicate, or need what it makes.
    """
    model = module.header.name + (f", {module.header.stem} stem" if module.header.stem else "")
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    division = _division(datamodule.batch_size, mode_of(trainer.strategy).layout, trainer.accumulate_grad_batches)
    split = mode_of(trainer.strategy).split_lines()
    return [
        _line("model", f"{model}, {num_parameters / 1e6:.2f} M parameters"),
        *_images(datamodule, train="train on", val="validate"),
        _line("batch", division),
        _mode(trainer),
        *(_line("" if index else "split", line) for index, line in enumerate(split)),
        _line("length", _length(trainer, datamodule)),
        _line("optimizer", module.optimization.in_words(module.network, datamodule)),
    ]


def _images(datamodule: Any, **purposes: str) -> list[str]:
    """The data set, its images by the purpose of their split, and what was found of pictures in folders."""
    sizes = {purpose: len(datamodule.sets.get(split, ())) for split, purpose in purposes.items()}
    images = ", ".join(f"{size:,} images to {purpose}" for purpose, size in sizes.items() if size)
    found = datamodule.source.found(datamodule.sets)
    return [_line("data", f"{datamodule.name}: {images}"), *(_line("", line) for line in found)]


def _length(trainer: Trainer, datamodule: Any) -> str:
    epochs, steps = trainer.max_epochs, trainer.max_steps
    limits = [counted(epochs, "epoch")] if epochs is not None and epochs >= 0 else []
    limits += [counted(steps, "optimizer step")] if steps >= 0 else []
    weights = os.environ.get("PL_GLOBAL_SEED")
    seeds = f"seed {datamodule.seed}" if weights == str(datamodule.seed) else f"data seed {datamodule.seed}"
    return f"{' or '.join(limits) or 'until it is stopped'}, {seeds}"


def _evaluated(datamodule: Any) -> list[str]:
    """The images that another subcommand reads."""
    if not datamodule.files:
        return _images(datamodule, val="validate on", test="test on")
    num_pictures = len(datamodule.sets["predict"])
    return [_line("data", f"{counted(len(datamodule.files), 'file')}, {num_pictures:,} of them pictures")]


def _mode(trainer: Trainer) -> str:
    processes = counted(trainer.world_size, "process", "processes")
    device = trainer.strategy.root_device.type
    return _line("mode", f"{mode_of(trainer.strategy).name}: {processes}, {device}, {trainer.precision}")


def _division(batch_size: int, layout: Layout, accumulated: int) -> str:
    """The division of the global batch, e.g. "64 = 2 replicas x 4 microbatches x 8 images per optimizer step"."""
    share = batch_size / (layout.num_replicas * layout.num_microbatches * accumulated)
    microbatches = f" x {layout.num_microbatches} microbatches" if layout.num_microbatches > 1 else ""
    steps = f" x {accumulated} accumulated" if accumulated > 1 else ""
    replicas = counted(layout.num_replicas, "replica")
    return f"{batch_size} = {replicas}{microbatches} x {share:g}{steps} images per optimizer step"


def results(trainer: Trainer) -> list[str]:
    """The best score of the monitored metric, and the accuracy after the last epoch."""
    checkpoint: Any = trainer.checkpoint_callback
    score, metrics = getattr(checkpoint, "best_model_score", None), trainer.callback_metrics
    best = [] if score is None else [f"best {checkpoint.monitor} {float(score):.4f}"]
    return best + [f"last {name} {float(metrics[name]):.4f}" for name in ("val/acc", "train/acc") if name in metrics]


def next_steps(folder: Path, stage: str, *, tests: bool) -> list[str]:
    """The run folder and commands to paste, a line each, never wrapped; `tests` if its checkpoint can be tested."""
    lines = [_line("run folder", shown(folder))]
    if stage == "predict":
        lines.append(_line("predictions", shown(folder / PREDICTIONS)))
    else:
        lines.append(_line("look at it", f"tensorboard --logdir {shown(folder)} --host localhost"))
    if tests:
        lines.append(_line("test it", f"python -m lit_cifar test {shown(folder)}"))
    return lines


def _unread(datamodule: Any) -> list[str]:
    """A line on the number of files that `predict` could not read, and the first of them; none if it has read all."""
    broken = [f"{file}: {error}" for file, error in datamodule.files.items() if error is not None]
    number = f"{len(broken)} of {len(datamodule.files)} files"
    return [_line("not read", f"{number}; the first is {broken[0]}")] if broken else []


def shown(path: Path) -> str:
    """`path` quoted for the shell, and relative if it is below the current folder."""
    absolute, here = path.absolute(), Path.cwd()  # resolve() would lose a link that the user has named
    return shlex.quote(str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute))


def _line(label: str, text: str) -> str:
    return f"{label:<12}{text}"


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and its noun, such as "2 processes"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
