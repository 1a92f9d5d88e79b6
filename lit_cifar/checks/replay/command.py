"""`python -m lit_cifar verify --module my_package.MyModule`: replays the first steps of anyone's training."""

import json
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

from lit_cifar.checks.classes import as_config_error, command_line
from lit_cifar.checks.replay.callback import RESULT, Replay
from lit_cifar.errors import ConfigError

_SILENT = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
# As many epochs as Lightning's own default: schedules ask for the number of steps.
_SHORT = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "max_epochs": 1000}


def replayed(module: str, data: str | None, *, steps: int, args: Sequence[str]) -> dict[str, Any]:
    """The report of the first steps; `args` are flags of Lightning's command line, without "fit"."""
    with as_config_error():
        replay = Replay(steps, stop=True)
    cli = command_line(module, data, args, **dict.fromkeys(_SILENT, False), **_SHORT)
    started = time()
    trainer: Any = cli.trainer
    trainer.callbacks.append(replay)
    trainer.fit(cli.model, datamodule=cli.datamodule)
    reports: list[dict[str, Any]] = [report.as_json() for report in replay.reports]
    found = Path(trainer.default_root_dir, RESULT)
    if not reports and found.exists() and found.stat().st_mtime >= started:  # by processes of `ddp_spawn`
        reports = json.loads(found.read_text())
    of_steps = [report for report in reports if not report["subject"]]  # an epoch may have ended among them
    if not of_steps:
        problem = f"the training of {module} ended before its first step"
        raise ConfigError(problem, remedy="pass a --trainer.max_steps above 0, and data")
    return next((report for report in reports if report["outcome"] == "fail"), of_steps[0])
