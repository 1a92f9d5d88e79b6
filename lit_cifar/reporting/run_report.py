"""What a run prints about itself: its settings at the start, its folder and the next commands at the end."""

import json
import os
import shlex
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.errors import printable
from lit_cifar.models.kernels import Kernels, in_words
from lit_cifar.reporting.environment import environment, strategy_name
from lit_cifar.reporting.evaluation_tables import PREDICTIONS
from lit_cifar.reporting.output import leave_out_banners, outlast_readers
from lit_cifar.reporting.run_folder import run_folder

FILE_NAME = "environment.json"


class RunReport(Callback):
    """Writes `environment.json`, and prints on rank 0 what a user wants to know before and after a run.

    Before a fit these are model, data, global batch and mode; afterwards the result, the run folder, and the commands
    to look at it and to test its checkpoint. Other subcommands print the mode and the folder. A run that fails prints
    no result.
    """

    def __init__(self) -> None:
        self.kernels: Mapping[Kernels, float] = {}  # seconds of a step with each, if `--kernels=auto` has timed them
        self._folder: Path | None = None
        self._started_at = 0.0
        self._announced = False
        self._pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare the terminal of a spawned process, as the parent has done its own: this is unpickled first."""
        self.__dict__.update(state)
        if self._pid != os.getpid():
            outlast_readers()
            leave_out_banners()

    def announce(self, trainer: Trainer, pl_module: LightningModule, datamodule: Any, *, stage: str) -> None:
        """Print the settings of the run, unless that was done.

        This may be called before the processes have met, once `setup` of the data module was called.
        """
        if not self._announced:
            self._announced = True
            lines = opening_lines(trainer, pl_module, datamodule) if stage == "fit" else [_mode(trainer)]
            if self.kernels:
                lines.append(_line("kernels", in_words(self.kernels)))
            print(*map(printable, lines), sep="\n", flush=True)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._started_at = perf_counter()
        self._folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / FILE_NAME
            if not path.exists():  # else it belongs to the run's first stage
                found = environment(trainer, data_name=datamodule.name)
                if self.kernels:
                    found["kernels_s"] = {str(each): seconds for each, seconds in self.kernels.items()}
                path.write_text(json.dumps(found, indent=2) + "\n")
        self.announce(trainer, pl_module, datamodule, stage=stage)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the result; Lightning calls this only if nothing failed."""
        self._announced = False
        if not trainer.is_global_zero:
            return
        lines = []
        if stage == "fit":
            duration = timedelta(seconds=round(perf_counter() - self._started_at))
            lines.append(_line("result", ", ".join([*results(trainer), f"took {duration}"])))
        if self._folder is not None:
            lines += next_steps(self._folder, stage, checkpoint=checkpoint_path(trainer) if stage == "fit" else None)
        if stage == "predict":
            lines += _unread(trainer.datamodule)  # type: ignore[attr-defined]  # Lightning's own omission
        print(*map(printable, lines), sep="\n", flush=True)


def opening_lines(trainer: Trainer, pl_module: LightningModule, datamodule: Any) -> list[str]:
    """Model, data, global batch and mode of a fit, a line each, and those of `Strategy.split_lines()`.

    This is called on rank 0 alone and before `Strategy.setup`, so `split_lines()` must neither communicate nor need
    what `setup` makes.
    """
    num_parameters = sum(parameter.numel() for parameter in pl_module.parameters())
    header = getattr(pl_module, "header", None)
    model = (
        type(pl_module).__name__ if header is None else header.name + (f", {header.stem} stem" if header.stem else "")
    )
    batch_split = BatchSplit.of(trainer.strategy)
    purposes = {"train": "train on", "val": "validate"}
    sizes = ", ".join(
        f"{len(datamodule.sets[name]):,} images to {purpose}"
        for name, purpose in purposes.items()
        if len(datamodule.sets.get(name, ()))
    )
    return [
        _line("model", f"{model}, {num_parameters / 1e6:.2f} M parameters"),
        _line("data", f"{datamodule.name}: {sizes}"),
        _line("batch", _division(datamodule.batch_size, batch_split, trainer.accumulate_grad_batches)),
        _mode(trainer),
        *_split(trainer.strategy),
    ]


def _mode(trainer: Trainer) -> str:
    processes = _count(trainer.world_size, "process", "processes")
    device = trainer.strategy.root_device.type
    return _line("mode", f"{strategy_name(trainer)}: {processes}, {device}, {trainer.precision}")


def _division(batch_size: int, batch_split: BatchSplit, accumulated: int) -> str:
    """How the global batch is divided, e.g. "64 = 2 replicas x 4 microbatches x 8 images per optimizer step"."""
    share = batch_size / (batch_split.num_replicas * batch_split.num_microbatches * accumulated)
    factors = [_count(batch_split.num_replicas, "replica")]
    if batch_split.num_microbatches > 1:
        factors.append(f"{batch_split.num_microbatches} microbatches")
    factors.append(f"{share:g}")
    if accumulated > 1:
        factors.append(f"{accumulated} accumulated")
    return f"{batch_size} = {' x '.join(factors)} images per optimizer step"


def _split(strategy: Any) -> list[str]:
    lines: list[str] = strategy.split_lines() if hasattr(strategy, "split_lines") else []
    return [_line("" if index else "split", line) for index, line in enumerate(lines)]


def results(trainer: Trainer) -> list[str]:
    """The best score of the monitored metric, and the accuracy after the last epoch."""
    found = []
    checkpoint: Any = trainer.checkpoint_callback
    score = getattr(checkpoint, "best_model_score", None)
    if score is not None:
        found.append(f"best {checkpoint.monitor} {float(score):.4f}")
    for name in ("val/acc", "train/acc"):
        if name in trainer.callback_metrics:
            found.append(f"last {name} {float(trainer.callback_metrics[name]):.4f}")
    return found


def checkpoint_path(trainer: Trainer) -> Path | None:
    """The best checkpoint that the fit wrote, else the last one."""
    written = [
        path
        for callback in trainer.checkpoint_callbacks  # the best comes before the last
        if (path := getattr(callback, "best_model_path", None) or getattr(callback, "newest", None))
    ]
    return Path(written[0]) if written else None


def next_steps(folder: Path, stage: str, *, checkpoint: Path | None = None) -> list[str]:
    """The run folder and commands to paste, a line each, never wrapped."""
    lines = [_line("run folder", shown(folder))]
    if stage == "predict":
        lines.append(_line("predictions", shown(folder / PREDICTIONS)))
    else:
        lines.append(_line("look at it", f"tensorboard --logdir {shown(folder)} --host localhost"))
        lines.append(_line("report", f"python -m lit_cifar report {shown(folder)}"))
    if checkpoint is not None:
        config = folder / "config.yaml"
        with_config = f" --config {shown(config)}" if config.exists() else ""
        lines.append(_line("test it", f"python -m lit_cifar test{with_config} --ckpt_path {shown(checkpoint)}"))
    return lines


def _unread(datamodule: Any) -> list[str]:
    """How many files `predict` could not read, and the first of them, in a line; nothing if it has read all."""
    files, errors = datamodule.folder.files, datamodule.folder.errors
    broken = [f"{file}: {error}" for file, error in zip(files, errors, strict=True) if error is not None]
    return [_line("not read", f"{len(broken)} of {len(files)} files; the first is {broken[0]}")] if broken else []


def shown(path: Path) -> str:
    """`path` quoted for the shell, and relative if it is below the current folder."""
    absolute = path.absolute()  # not resolve(): the user may have named a link
    here = Path.cwd()
    return shlex.quote(str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute))


def _line(label: str, text: str) -> str:
    return f"{label:<12}{text}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
