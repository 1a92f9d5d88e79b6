"""`python -m lit_cifar.checks.relations.classes MODULE DATA FLAGS`: a script that fits anyone's classes.

MODULE names a `LightningModule`, DATA a `LightningDataModule` or nothing; FLAGS are those of Lightning's command line.
"""

import sys
import warnings
from pkgutil import resolve_name

from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    module, data, *flags = sys.argv[1:]
    warnings.filterwarnings("ignore", ".*LightningCLI's args parameter")  # the process's own name our command
    cli = LightningCLI(
        resolve_name(module),
        resolve_name(data) if data else None,
        args=flags,
        run=False,
        save_config_callback=None,
        seed_everything_default=0,
        parser_kwargs={"exit_on_error": False},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
