"""Anyone's `LightningModule` and `LightningDataModule` by their names, and the trainer that flags describe."""

import sys
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

from lit_cifar.errors import ConfigError


def command_line(module: str, data: str | None, args: Sequence[str], **trainer_defaults: Any) -> LightningCLI:
    """What Lightning's command line makes of these classes; `args` are its flags, without "fit"."""
    classes: dict[str, Any] = {"model_class": _class_of("--module", module, LightningModule)}
    if data is not None:
        classes["datamodule_class"] = _class_of("--data", data, LightningDataModule)
    with warnings.catch_warnings(), as_config_error():
        warnings.filterwarnings("ignore", ".*LightningCLI's args parameter")  # the process's own name our command
        return LightningCLI(
            **classes,
            args=list(args),
            run=False,
            save_config_callback=None,
            seed_everything_default=0,
            trainer_defaults=trainer_defaults,
            parser_kwargs={"exit_on_error": False},
        )


@contextmanager
def as_config_error() -> Iterator[None]:
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


if __name__ == "__main__":  # python -m lit_cifar.checks.classes MODULE DATA FLAGS, with an empty DATA for none
    cli = command_line(sys.argv[1], sys.argv[2] or None, sys.argv[3:])
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
