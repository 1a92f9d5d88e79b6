"""Arguments of Lightning's Trainer that it would take, and by which a run would not do what its user expects."""

import math
import shlex
from collections.abc import Iterator

import torch
from jsonargparse import Namespace

from lit_cifar.errors import ConfigError, bounded

_MANY = 2**16  # more devices than anybody has
# The least and the largest value of Lightning's numbers that nobody else checks before the first step.
BOUNDS: dict[str, tuple[float, float]] = {
    "seed_everything": (0, 2**32 - 1),
    "trainer.devices": (-1, _MANY),
    "trainer.check_val_every_n_epoch": (1, math.inf),
    "trainer.log_every_n_steps": (0, math.inf),
    "trainer.accumulate_grad_batches": (1, math.inf),
    "trainer.gradient_clip_val": (0, math.inf),
}


def check_bounds(arguments: Namespace) -> None:
    for name, (least, most) in BOUNDS.items():
        value = arguments.get(name)
        if isinstance(value, str) and value.isdecimal():  # the number of devices is read as a string
            value = int(value)
        if isinstance(value, int | float):
            bounded(f"--{name}", value, least, most)


def check_arguments(trainer: Namespace, *, stage: str) -> None:
    """Refuse arguments of the Trainer by which it would not train, log or save, or would write to another folder."""
    for name, problem, remedy in _refused(trainer, stage):
        given = str(trainer[name]).lower() if isinstance(trainer[name], bool) else trainer[name]
        raise ConfigError(f"--trainer.{name}={given}{problem}", remedy=remedy)


def _refused(trainer: Namespace, stage: str) -> Iterator[tuple[str, str, str]]:
    """The name of each, what is said behind its value, and a remedy."""
    if (folder := trainer.default_root_dir) is not None:
        remedy = "pass " + shlex.quote(f"--run_dir={folder}")
        yield "default_root_dir", " has no effect: everything goes to the run folder", remedy
    if trainer.accelerator in ("gpu", "cuda") and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        remedy = "pass --trainer.accelerator=cpu; `nvidia-smi` and `python -m torch.utils.collect_env` say why"
        yield "accelerator", f", and torch {torch.__version__} finds no GPU here", remedy
    if str(trainer.devices) in ("0", "[]"):
        remedy = "pass a number, such as --trainer.devices=2; for no GPU pass --trainer.accelerator=cpu"
        yield "devices", " is no device to train on", remedy
    trains, part = stage == "fit", "val" if stage == "validate" else stage
    for name in ("limit_train_batches", "max_epochs", "max_steps") if trains else (f"limit_{part}_batches",):
        if trainer[name] == 0:
            yield name, f" would {'train' if trains else stage} nothing", f"pass another --trainer.{name}"
    if trainer.val_check_interval == 0:
        yield "val_check_interval", " is no interval", "pass --trainer.val_check_interval=1.0 for each epoch's end"
    if trains and not isinstance(trainer.val_check_interval, int | float | None):
        problem = ": by the clock, a validation comes elsewhere in each process, and when a run is repeated"
        yield "val_check_interval", problem, "pass a number of batches, or a share of them, such as 0.5"
    for name, refused in (("logger", (False, [])), ("enable_checkpointing", (False,)), ("barebones", (True,))):
        if trainer[name] in refused:
            remedy = "leave it out; --trainer.fast_dev_run=N runs a few steps and writes nothing"
            yield name, ": every run writes logs and checkpoints", remedy
