"""`python -m lit_cifar.checks.relations.classes MODULE DATA FLAGS`: a script that fits anyone's classes.

MODULE names a `LightningModule`, DATA a `LightningDataModule` or nothing; FLAGS are those of Lightning's command line.
"""

import sys
import warnings
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from lightning.pytorch.cli import LightningCLI


def main(module: str, data: str, flags: Sequence[str]) -> None:
    classes: dict[str, Any] = {"model_class": resolve_name(module)}
    if data:
        classes["datamodule_class"] = resolve_name(data)
    warnings.filterwarnings("ignore", ".*LightningCLI's args parameter")  # the process's own name our command
    cli = LightningCLI(
        **classes,
        args=list(flags),
        run=False,
        save_config_callback=None,
        seed_everything_default=0,
        parser_kwargs={"exit_on_error": False},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
