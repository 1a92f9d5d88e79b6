"""`python -m lit_cifar fit|validate|test|predict`: LightningCLI with our defaults, short errors and exit codes.

Exit status: 0 done, 1 failed while running, 2 the user's input, 143 stopped by a signal after saving.
"""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal, cast

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch.distributed import is_torchelastic_launched

from lit_cifar import internals
from lit_cifar.checkpoint.atomic import reporting_disk
from lit_cifar.checkpoint.callbacks import BestCheckpoint, LastCheckpoint
from lit_cifar.checkpoint.exact_resume import SameStart
from lit_cifar.checkpoint.files import CheckpointFiles
from lit_cifar.checks.replica_audit.callback import ReplicaAudit
from lit_cifar.checks.watchdog.callback import Watchdog, name_who_ends
from lit_cifar.cli.checkpoint_selection import Start, spelled_out
from lit_cifar.cli.overview import PROGRAM, answer
from lit_cifar.cli.paths import expand_paths
from lit_cifar.cli.preflight import check_run, check_sizes
from lit_cifar.cli.trainer_arguments import check_arguments, check_bounds
from lit_cifar.cli.usage_errors import Parser, as_config_error, cli_exit
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.dataset import open_dataset
from lit_cifar.errors import ConfigError
from lit_cifar.launch import startup
from lit_cifar.launch.signals import handlers_put_back, signals_to_spawned
from lit_cifar.launch.torchrun import task_variables
from lit_cifar.launch.world_size import as_list, check_processes, resolve_world_size
from lit_cifar.models import DEFAULT_ARCH
from lit_cifar.models.precision import choose_fast, keep_choice
from lit_cifar.reporting import run_folder
from lit_cifar.reporting.figures import EvaluationFigures
from lit_cifar.reporting.loggers import logger_below, run_loggers
from lit_cifar.reporting.output import outlast_streams, without_banners
from lit_cifar.reporting.progress import EpochLines, StepBar
from lit_cifar.reporting.run_folder import RunLock, SavedConfig, process_rank
from lit_cifar.reporting.run_report import announce
from lit_cifar.task.callbacks import NoProfiler, default_callbacks, place, skip_idle_hooks
from lit_cifar.task.module import LitResNet

# Words by which a command or a file may ask for one of our strategies; `ddp` and `ddp_spawn` are Lightning's.
MAY_NAME_STRATEGY = re.compile(r"strategy(?!=ddp(_spawn)?$)|config|^-c|^--trainer(=|$)", flags=re.IGNORECASE)
# The module of each command that is not Lightning's: its `main` returns the exit status.
TOOLS = {"doctor": "doctor", "ray": "ray", "relations": "relations", "verify": "verify.command"}


def main(args: Sequence[str] | None = None) -> None:
    """Run a subcommand; `args` are the words of a command line, by default the process's own.

    What cannot work leaves by SystemExit, with status 2 and at most five lines on stderr; other commands by their own.
    """
    words = sys.argv[1:] if args is None else list(args)
    if is_torchelastic_launched() or (process_rank() and startup.STARTED_BY_COPY):
        startup.exit_with_parent()  # but not after a shell, in which a user has started the ranks
    # Loggers, warning filters, streams and signal handlers of this process are left as they were.
    with handlers_put_back(), without_banners(), redirect_stdout(sys.stdout), redirect_stderr(sys.stderr):
        outlast_streams()
        with cli_exit():
            _run(words)


def _run(words: list[str]) -> None:
    answer(words)
    if words[0] in TOOLS:
        from lit_cifar.cli.gone import refuse_words

        refuse_words(words)
        startup.raise_at_interrupt(startup.raise_once)  # they end the processes that they have started
        raise SystemExit(import_module(f"lit_cifar.tools.{TOOLS[words[0]]}").main(words[1:]))
    if "SLURM_STEP_NUM_TASKS" in os.environ:  # a task of `srun` is then what torchrun would have started
        os.environ.update(task_variables(os.environ))
    if words[0] in ("validate", "test", "predict"):
        words = spelled_out(words)
    if any(MAY_NAME_STRATEGY.search(word) for word in words):
        import_module("lit_cifar.strategies")
    internals.require(internals.RUN)
    with closing(RunLock()) as lock:
        CLI(words, lock=lock)


class CLI(LightningCLI):
    """Adds a run folder, and finds the user's mistakes before any process is started."""

    def __init__(self, words: list[str], *, lock: RunLock) -> None:
        self._lock, self._words = lock, words
        self._named = next((word for word in words[:1] if word in self.subcommands()), None)
        self._own_loggers: list[Namespace] = []  # loggers that the user has asked for
        self._choice = ""  # what is fast here and was left open, in words
        self._classes: tuple[str, ...] = ()  # classes of the data, or of the checkpoint if the pictures are gone
        super().__init__(
            LitResNet,
            CIFAR10DataModule,
            args=words,
            parser_class=Parser,
            parser_kwargs={"prog": PROGRAM},
            save_config_callback=SavedConfig,
            seed_everything_default=0,
            trainer_defaults={
                "max_epochs": 24,
                "enable_model_summary": False,
                "num_sanity_val_steps": 0,  # it would take 10 s of a CPU core before the first step
                "callbacks": default_callbacks(),
            },
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # The parser.

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add flags that belong to neither trainer, model nor data; their texts are in `help.py`."""
        parser.add_argument("--run_dir", type=str | None, default=None)
        parser.add_argument("--resume", type=Literal["auto"] | None, default=None)
        parser.add_argument("--virtual_replicas", type=int | None, default=None)
        parser.add_lightning_class_args(BestCheckpoint, "best_checkpoint")
        parser.add_lightning_class_args(LastCheckpoint, "last_checkpoint")
        parser.add_lightning_class_args(EvaluationFigures, "figures")
        parser.add_lightning_class_args(Watchdog, "watchdog")
        parser.add_lightning_class_args(ReplicaAudit, "replica_audit")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if self._named not in (None, subcommand):
            return self.init_parser(**kwargs)  # adding the options of other subcommands takes long
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        cast(Parser, parser).subcommand, cast(Parser, parser).words = subcommand, self._words
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse `args`; Lightning's own step warns when a test or a notebook passes some."""
        cast(Parser, parser).words = self._words
        self.config = parser.parse_args(args)
        expand_paths(vars(self._arguments))
        check_bounds(self._arguments)

    # Data, model and trainer.

    @property
    def _subcommand(self) -> str:
        return str(self.config["subcommand"])

    @property
    def _arguments(self) -> Namespace:
        arguments: Namespace = self.config[self._subcommand]
        return arguments

    def _parse_ckpt_path(self) -> None:
        """Read the checkpoint; a fit may have none.

        Lightning's own step would override the user's flags by the checkpoint's, and knows "best" and "last".
        """
        folder = self._arguments.run_dir
        if self._arguments.resume is not None and folder is not None and os.path.lexists(folder):
            self._lock.take(Path(folder))  # before its checkpoints are read
        self._start = Start(self._subcommand, self._arguments)

    def before_instantiate_classes(self) -> None:
        """Refuse arguments that the Trainer accepts but a run folder cannot use; tell the model about the data."""
        check_arguments(self._arguments.trainer, stage=self._subcommand)
        model, data = self._arguments.model, self._arguments.data
        source = open_dataset(data.dataset, data.root, image_size=data.image_size)
        if self._subcommand == "predict":
            self._start.name_classes(source)
            self._arguments.return_predictions = False  # nobody reads them: images times classes
        if model.network is None:
            model.arch = model.arch or DEFAULT_ARCH
        check_sizes(model, source)
        self._classes = source.classes
        model.num_classes, model.image_size = len(source.classes), source.image_size
        if self._subcommand == "fit":
            if (checkpoint := self._arguments.ckpt_path) is None:
                self._choice = choose_fast(self._arguments)
            elif (folder := run_folder.of_checkpoint(Path(checkpoint))) is not None:
                keep_choice(self._arguments, before=run_folder.read_config(folder))
        else:  # a setting of a training alone, which some modes refuse
            self._arguments.trainer.sync_batchnorm = False

    def instantiate_classes(self) -> None:
        """Build data, model and trainer; an error of their constructors is a mistake in the user's input.

        The loggers are made later, when the run is known to be possible: they create folders in the run folder.
        """
        trainer = self._arguments.trainer
        given = trainer.logger
        if not trainer.fast_dev_run:
            self._own_loggers = [] if given in (None, True) else as_list(given)
            trainer.logger = False
        self.save_config_kwargs = {"logger": given, "trains": self._subcommand == "fit"}
        with as_config_error():
            super().instantiate_classes()
        self.datamodule.source.classes = self._classes
        self._start.check(self.model, self.datamodule, self.trainer)
        trainer.logger = given

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
        """Add what shows progress, if the user has no bar, the checkpoint plugin, and what the processes need."""
        others = any(isinstance(callback, ProgressBar) for callback in as_list(config["callbacks"]))
        if config["enable_progress_bar"] is not False and not others:
            config["enable_progress_bar"] = sys.stdout.isatty()
            bars = [StepBar(refresh_rate=10)] if config["enable_progress_bar"] else []
            callbacks = [EpochLines(), *bars, *callbacks]
        callbacks = [SameStart(self._start.point), *callbacks]
        if (num_parts := self._arguments.virtual_replicas) is not None:
            from lit_cifar.strategies.virtual_replicas import VirtualReplicas

            callbacks = [VirtualReplicas(num_parts), *callbacks]
        if self._subcommand == "predict":
            from lit_cifar.reporting.predictions import PredictionWriter

            callbacks.append(PredictionWriter())
        config["profiler"] = config["profiler"] or NoProfiler()
        config["plugins"] = [*as_list(config["plugins"]), CheckpointFiles()]
        if config["sync_batchnorm"]:
            from lit_cifar.strategies import ProcessSyncBatchNorm

            config["plugins"].append(ProcessSyncBatchNorm())
        if self._arguments.model.compile == "cuda_graphs" and config["strategy"] == "ddp":
            import_module("lit_cifar.strategies")
            config["strategy"] = "ddp_flat"  # its communication, which a graph cannot hold, comes after backward
        resolve_world_size(config)
        try:
            trainer = super()._instantiate_trainer(config, callbacks)
        except TypeError as error:
            if "`devices`" not in str(error):
                raise
            given = f"--trainer.devices={config['devices']}"
            raise ConfigError(f"{given}: {error}", remedy="pass the number of devices: --trainer.devices=2") from error
        trainer.callbacks.sort(key=place)  # type: ignore[attr-defined]  # Lightning's own omission
        skip_idle_hooks(trainer.callbacks)  # type: ignore[attr-defined]
        return trainer

    # The run.

    def _run_subcommand(self, subcommand: str) -> None:
        check_processes(self.trainer, rank=process_rank())
        if process_rank() == 0:
            self._check(subcommand)
        else:
            self.datamodule.trainer = self.trainer
            with suppress(ConfigError):  # what cannot be read yet is left to Lightning's call
                self.datamodule.setup(subcommand)
        folder = None if self._arguments.trainer.fast_dev_run else self._make_run_folder()
        if process_rank() == 0:
            start = {"folder": folder, "checkpoint": self._arguments.ckpt_path, "choice": self._choice}
            announce(self.trainer, self.model, self.datamodule, stage=subcommand, **start)
        name_who_ends(self.trainer)
        if subcommand != "fit":  # Lightning's handler would end an evaluation with status 0
            self.trainer._signal_connector.register_signal_handlers = list  # type: ignore[assignment, method-assign]
        with signals_to_spawned(self.trainer), reporting_disk(folder):
            super()._run_subcommand(subcommand)

    def _check(self, subcommand: str) -> None:
        check_run(self.trainer, self.model, self.datamodule, asked=self._arguments, stage=subcommand, start=self._start)

    def _make_run_folder(self) -> Path:
        """Make the folder and the loggers that write into it; ours come first, as the first one names the folder."""
        if self._arguments.run_dir is not None:
            self._keep_apart(Path(self._arguments.run_dir))
        mode, resume = str(self._arguments.trainer.strategy), self._arguments.resume is not None
        label = self._subcommand if mode == "auto" or not mode.isidentifier() else f"{self._subcommand}-{mode}"
        folder = run_folder.create_run_folder(self._arguments.run_dir, label=label, lock=self._lock, resume=resume)
        self._keep_apart(folder)
        saved = next(c for c in self.trainer.callbacks if isinstance(c, SavedConfig))  # type: ignore[attr-defined]
        try:
            own = [logger_below(folder, given, saved.settings()) for given in self._own_loggers]
        except ConfigError:
            if process_rank() == 0 and not resume:  # rank 0 holds the lock until the program ends
                rmtree(folder, ignore_errors=True)  # nothing was in it but what the logger has written
            raise
        position = self._start.position
        first_step = position.get("global_step", 0) if resume else None
        with reporting_disk(folder):
            ours = run_loggers(folder, kept_rows=position.get("rows", 0), first_step=first_step)
            for logger in ours:
                logger.log_hyperparams(saved.settings())
        self.trainer.loggers = [*ours, *own]
        return folder

    def _keep_apart(self, folder: Path) -> None:
        """Give the user's own checkpoint callbacks a folder below ours: they may call their files `last.ckpt` too."""
        ours, best = folder / "checkpoints", self._get(self.config_init, "best_checkpoint")
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if callback is best or not isinstance(callback, ModelCheckpoint | OnExceptionCheckpoint):
                continue
            name = type(callback).__name__
            callback.dirpath = str(callback.dirpath or ours / name)
            if "://" in callback.dirpath:
                problem = f"{name} would write to {callback.dirpath}, and not into a folder of this machine"
                raise ConfigError(problem, remedy="pass a folder, where the storage may be mounted")
            if Path(callback.dirpath, callback.filename or "x").parent.resolve() == ours.resolve():
                problem = f"{name} would write into {ours}, where the run keeps what it resumes from"
                raise ConfigError(problem, remedy="leave out its dirpath, and any folder in its filename")
