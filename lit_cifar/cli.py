"""`python -m lit_cifar fit|validate|test|predict`: LightningCLI with our defaults, short errors and exit codes.

Exit status: 0 done, 1 failed while running, 2 the user's input.
"""

import logging
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.callbacks import (
    Checkpoint,
    EvaluationFigures,
    FinalSettings,
    ModelGraph,
    PerRankAccuracy,
    PredictionWriter,
    ProgressBar,
    RunReport,
    Throughput,
)
from lit_cifar.checkpoints import Header, read_checkpoint
from lit_cifar.commands import COMMANDS
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.errors import CheckpointError, ConfigError
from lit_cifar.layout import Layout
from lit_cifar.module import LitResNet
from lit_cifar.run_folder import create_run_folder, process_rank, run_loggers
from lit_cifar.strategies import ProcessSyncBatchNorm

_MAX_ERROR_LINES = 5


def main(args: Sequence[str] | None = None) -> None:
    """Run a subcommand.

    Args:
        args: Arguments as on the command line; by default those of the process.

    Raises:
        SystemExit: With status 2 and at most five lines on stderr, where the user's input cannot work; with the
            status of a command that is not Lightning's.
    """
    _quieten()
    words = sys.argv[1:] if args is None else list(args)
    try:
        if words and words[0] in COMMANDS:
            raise SystemExit(COMMANDS[words[0]](words[1:]))
        CLI(
            LitResNet,
            CIFAR10DataModule,
            args=None if args is None else list(args),
            parser_class=_Parser,
            parser_kwargs={"epilog": f"Further commands, each with a --help of its own: {', '.join(COMMANDS)}."},
            save_config_callback=_SaveConfig,
            seed_everything_default=0,
            trainer_defaults={"max_epochs": 15, "enable_model_summary": False, "callbacks": _callbacks()},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )
    except ConfigError as error:
        _refuse(str(error))


class CLI(LightningCLI):
    """Adds a run folder, and finds the user's mistakes before any process is started."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """What belongs to neither trainer, model nor data."""
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="Folder of this run; by default runs/<time>-<label>."
        )
        parser.add_lightning_class_args(Checkpoint, "checkpoint")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse `args`; Lightning's own step warns when a test or a notebook passes some."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Compare the checkpoint's header with the model asked for; only a fit goes without a checkpoint.

        Replaces Lightning's own step, which overrides the user's model flags by the checkpoint's. Its words "best" and
        "last" for a checkpoint of this very process mean nothing here, where each command has a run folder of its own.

        Raises:
            CheckpointError: None is given, it cannot be read, or it is of another network.
        """
        subcommand = self.config["subcommand"]
        path, model = self.config[subcommand].ckpt_path, self.config[subcommand].model
        if path is None and subcommand == "fit":
            return
        if path is None:
            raise CheckpointError(
                f"{subcommand} without a checkpoint would run an untrained network",
                remedy="pass --ckpt_path=RUN_FOLDER/checkpoints/best.ckpt",
            )
        header = Header(arch=model.arch, stem=model.stem, num_classes=model.num_classes)
        header.check(read_checkpoint(Path(path)))

    def instantiate_classes(self) -> None:
        """Build data, model and trainer; what their constructors refuse is the user's input."""
        try:
            super().instantiate_classes()
        except ConfigError:
            raise
        except (MisconfigurationException, ValueError) as error:
            raise _as_config_error(error) from error

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
        """Leave the loggers out until the run is known to be possible: they make its folder."""
        self.wants_run_folder = config["logger"] in (None, True) and not config["fast_dev_run"]
        if self.wants_run_folder:
            config["logger"] = False
        if config["enable_progress_bar"] is not False:
            callbacks = [ProgressBar(), *callbacks]
        if config["sync_batchnorm"]:
            config["plugins"] = [*_as_list(config["plugins"]), ProcessSyncBatchNorm()]
        return super()._instantiate_trainer(config, callbacks)

    def _run_subcommand(self, subcommand: str) -> None:
        if process_rank() == 0:
            self._check(subcommand)
        if self.wants_run_folder:
            mode = str(self._get(self.config, "trainer").strategy)
            label = subcommand if mode == "auto" or not mode.isidentifier() else f"{subcommand}-{mode}"
            folder = create_run_folder(self._get(self.config, "run_dir"), label=label)
            self.trainer.loggers = run_loggers(folder)
        # Lightning does so after it has loaded a checkpoint, whose float64 weights would be rounded by then.
        self.trainer.precision_plugin.convert_module(self.model)
        super()._run_subcommand(subcommand)

    def _check(self, subcommand: str) -> None:
        """Find in one process, before others are started, what `Trainer` would find in each of them."""
        if self.trainer.world_size == 1 and self._get(self.config, "trainer").sync_batchnorm:
            rank_zero_warn("--trainer.sync_batchnorm=true has no effect on one process: it sees the whole batch")
        layout = Layout.of(self.trainer.strategy)
        if self._get(self.config, "model").batchnorm_chunks is not None and layout != Layout():
            raise ConfigError(
                f"--model.batchnorm_chunks imitates a mode on one device, and this is one: {layout}",
                remedy="leave it out, or drop --trainer.strategy and pass --trainer.devices=1",
            )
        self.trainer.strategy.connect(self.model)  # where it cuts the network, if it does
        self.datamodule.trainer = self.trainer
        self.datamodule.prepare_data()
        self.datamodule.setup(subcommand)
        if subcommand == "fit":
            self.datamodule.train_sampler().check()


class _Parser(LightningArgumentParser):
    """Short errors: what is wrong, not the three hundred options that there are."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        _refuse(_without_alternatives(message), remedy=f"see {_program()} --help")


class _SaveConfig(SaveConfigCallback):
    """Saves the resolved configuration without `run_dir`, so that `test --config` writes to a folder of its own."""

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **kwargs: Any) -> None:
        super().__init__(parser, config.clone(), **kwargs)
        self.config.run_dir = None


def _callbacks() -> list[L.Callback]:
    """What every run has; `--trainer.callbacks` adds to it."""
    return [
        LearningRateMonitor(),
        Throughput(),
        PerRankAccuracy(),
        EvaluationFigures(),
        ModelGraph(),
        FinalSettings(),
        PredictionWriter(),
        RunReport(),
    ]


# Said by Lightning in every run, and nothing that the user could change.
_NOISE = (
    r".*LeafSpec.* is deprecated",  # Lightning's own use of torch's pytree, from torch 2.15 on
    r"torch.distributed.nn.functional.all_gather is deprecated",  # likewise, in Strategy.all_gather
    r"Total length of `list` across ranks is zero",  # --data.val_size=0 is meant
    r"The dirpath has changed from",  # a test writes to a folder of its own, and ranks no checkpoints
)


def _quieten() -> None:
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_advertisement)


def _no_advertisement(record: logging.LogRecord) -> bool:
    return "litlogger" not in record.getMessage()


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _as_config_error(error: Exception) -> ConfigError:
    """Lightning's and torch's complaint about an argument, with our remedy where we know one."""
    if "invalid strategy name" in str(error):
        variants = re.compile("find_unused|offload|stage|xla|tpu|single")
        known = ", ".join(name for name in StrategyRegistry.available_strategies() if not variants.search(name))
        return ConfigError(str(error).split(". ")[0], remedy=f"the known ones: {known}")
    return ConfigError(str(error), remedy=f"see {_program()} --help")


def _without_alternatives(message: str) -> str:
    """The complaint about an option that may be one of several types, reduced to the type that was meant."""
    key, _, rest = message.partition("\n")
    _, found, meant = rest.partition("- Problem with given class_path ")
    return f"{key} {meant.partition('Given value type')[0]}" if found else message


def _program() -> str:
    return "python -m lit_cifar " + (sys.argv[1] if len(sys.argv) > 1 and sys.argv[1].isalpha() else "fit")


def _refuse(message: str, *, remedy: str | None = None) -> NoReturn:
    """Print `message`, and `remedy` below it, on stderr in at most five lines, and exit with status 2."""
    rank = f"[rank {process_rank()}] " if process_rank() else ""
    lines = [line.strip()[:300] for line in message.splitlines() if line.strip()]
    last = [] if remedy is None else [remedy]
    shown = lines[: _MAX_ERROR_LINES - len(last)] + last
    print(f"{rank}lit_cifar: error: " + "\n  ".join(shown), file=sys.stderr, flush=True)
    raise SystemExit(2)
