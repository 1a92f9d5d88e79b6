"""Arguments of Lightning's Trainer that it would take, and by which a run would not do what its user expects."""

import math
import shlex

import torch
from jsonargparse import Namespace

from lit_cifar.errors import ConfigError, bounded

_MANY = 2**16  # more devices than anybody has
# The least and the largest value of Lightning's numbers that nobody else checks before the first step.
BOUNDS: dict[str, tuple[float, float]] = {
    "seed_everything": (0, 2**32 - 1),
    "trainer.devices": (-1, _MANY),
    "trainer.min_epochs": (0, math.inf),
    "trainer.min_steps": (0, math.inf),
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


def check_arguments(trainer: Namespace, *, trains: bool) -> None:
    """Refuse arguments of the Trainer by which it would not train, log or save, or would write to another folder."""
    if trainer.default_root_dir is not None:
        folder = trainer.default_root_dir
        problem = f"--trainer.default_root_dir={folder} has no effect: everything goes to the run folder"
        raise ConfigError(problem, remedy="pass " + shlex.quote(f"--run_dir={folder}"))
    if trainer.accelerator in ("gpu", "cuda") and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        problem = f"--trainer.accelerator={trainer.accelerator}, and torch {torch.__version__} finds no GPU here"
        remedy = "pass --trainer.accelerator=cpu; `nvidia-smi` and `python -m torch.utils.collect_env` say why"
        raise ConfigError(problem, remedy=remedy)
    if str(trainer.devices) in ("0", "[]"):
        problem = f"--trainer.devices={trainer.devices} is no device to train on"
        remedy = "leave it out, or pass a number: --trainer.devices=2; for no GPU pass --trainer.accelerator=cpu"
        raise ConfigError(problem, remedy=remedy)
    for name in ("limit_train_batches", "max_epochs", "max_steps"):
        if trains and trainer[name] == 0:
            raise ConfigError(f"--trainer.{name}=0 would train nothing", remedy=f"leave it out, or pass another {name}")
    for least, most in (("min_epochs", "max_epochs"), ("min_steps", "max_steps")):
        if trains and trainer[least] and trainer[most] not in (None, -1) and trainer[least] > trainer[most]:
            problem = f"--trainer.{least}={trainer[least]} is more than {most}={trainer[most]}, which ends the run"
            raise ConfigError(problem, remedy=f"pass --trainer.{most}={trainer[least]}, or leave out {least}")
    if trainer.val_check_interval == 0:
        problem = "--trainer.val_check_interval=0 is no interval"
        raise ConfigError(problem, remedy="pass --trainer.val_check_interval=1.0 to validate after each epoch")
    if trains and not isinstance(trainer.val_check_interval, int | float | None):
        problem = "by the clock, a validation comes elsewhere in each process, and when a run is repeated"
        remedy = "pass a number of batches, or a share of them: --trainer.val_check_interval=0.5"
        raise ConfigError(f"--trainer.val_check_interval={trainer.val_check_interval}: {problem}", remedy=remedy)
    for name, refused in (("logger", (False, [])), ("enable_checkpointing", (False,)), ("barebones", (True,))):
        if trainer[name] in refused:
            problem = f"--trainer.{name}={str(trainer[name]).lower()}: every run writes logs and checkpoints"
            remedy = "leave it out; --trainer.fast_dev_run=N runs a few steps and writes nothing"
            raise ConfigError(problem, remedy=remedy)
