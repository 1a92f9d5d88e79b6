"""`python -m lit_cifar verify --module my_package.MyModule`: replays the first steps of anyone's training."""

import json
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from time import time
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

from lit_cifar.checks.replay.callback import RESULT, Replay
from lit_cifar.errors import ConfigError


def replayed(module: str, data: str | None, *, steps: int, args: Sequence[str]) -> dict[str, Any]:
    """The report of the first steps; `args` are flags of Lightning's command line, without "fit"."""
    classes: dict[str, Any] = {"model_class": _class_of("--module", module, LightningModule)}
    if data is not None:
        classes["datamodule_class"] = _class_of("--data", data, LightningDataModule)
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(silent, False) | {"num_sanity_val_steps": 0, "limit_val_batches": 0, "max_epochs": -1}
    with warnings.catch_warnings(), _as_config_error():
        warnings.filterwarnings("ignore", ".*LightningCLI's args parameter")  # the process's own name our command
        cli = LightningCLI(
            **classes,
            args=list(args),
            run=False,
            save_config_callback=None,
            seed_everything_default=0,
            trainer_defaults=quiet,
            parser_kwargs={"exit_on_error": False},
        )
        replay = Replay(steps, stop=True)
    started = time()
    trainer: Any = cli.trainer
    trainer.callbacks.append(replay)
    trainer.fit(cli.model, datamodule=cli.datamodule)
    if replay.reports:
        return replay.reports[0].as_json()
    found = Path(trainer.default_root_dir, RESULT)
    if not found.exists() or found.stat().st_mtime < started:  # processes of `ddp_spawn` would have written it
        problem = f"the training of {module} ended before its first step"
        raise ConfigError(problem, remedy="pass a --trainer.max_steps above 0, and data")
    reports: list[dict[str, Any]] = json.loads(found.read_text())
    return reports[0]


@contextmanager
def _as_config_error() -> Iterator[None]:
    """Turn errors of Lightning and its parser about options into a `ConfigError`."""
    try:
        yield
    except (ArgumentError, MisconfigurationException, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        remedy = "pass options of the trainer, the module and the data alone, as they take them"
        raise ConfigError("\n".join(lines[:3]), remedy=remedy) from error


def _class_of(flag: str, path: str, kind: type[Any]) -> Any:
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{flag}={path} cannot be imported: {error}",
            remedy="pass package.module.ClassName, as it is imported from this folder or from PYTHONPATH",
        ) from None
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{flag}={path} is no {kind.__name__}", remedy=f"pass a class that inherits {kind.__name__}")
    return found
