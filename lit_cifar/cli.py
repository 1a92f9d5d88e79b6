"""`python -m lit_cifar fit|validate|test|predict`: LightningCLI with our defaults, short errors and exit codes.

Exit status: 0 done, 1 failed while running, 2 the user's input, 143 stopped by a signal after saving.
"""

import errno
import os
import signal
import sys
import threading
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing import active_children
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import lightning as L
from jsonargparse import DefaultHelpFormatter, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.distributed import is_torchelastic_launched
from torch.multiprocessing.spawn import ProcessExitedException

from lit_cifar import __version__
from lit_cifar.callbacks import (
    EXIT_STOPPED,
    BestCheckpoint,
    EvaluationFigures,
    ExactResume,
    FinalSettings,
    Keystrokes,
    LastCheckpoint,
    ModelGraph,
    PerRankAccuracy,
    PredictionWriter,
    ProgressBar,
    RunReport,
    SampleAudit,
    StepBoundary,
    Throughput,
    Watchdog,
)
from lit_cifar.checkpoint.files import newest_valid, save_error
from lit_cifar.checkpoint.format import check_shapes, holds_weights_alone, load_weights, read_checkpoint
from lit_cifar.checkpoint.lightning_io import CheckpointFiles
from lit_cifar.cli_help import COMMON, SUBCOMMANDS, replace_texts
from lit_cifar.commands import COMMANDS
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.sources import open_dataset
from lit_cifar.errors import CheckpointError, ConfigError, SaveError
from lit_cifar.launch.processes import as_list, check_processes, settle_processes
from lit_cifar.layout import Layout
from lit_cifar.models import DEFAULT_ARCH
from lit_cifar.models.blocks import check_network
from lit_cifar.module import LitResNet
from lit_cifar.reporting.output import outlast_readers, without_banners
from lit_cifar.reporting.run_folder import create_run_folder, logger_below, process_rank, run_loggers
from lit_cifar.sample_audit.digest import Receipt, order_settings
from lit_cifar.strategies import ProcessSyncBatchNorm
from lit_cifar.usage_errors import (
    PROGRAM,
    Parser,
    as_config_error,
    check_clipping,
    check_command,
    check_kernels,
    check_trainer,
    refuse,
)
from lit_cifar.watchdog import end_with_launcher

_DESCRIPTION = "Train networks on CIFAR-10 and similar data, in any mode of parallelism."
_EPILOG = """\
further commands, each with a --help of its own:
    doctor              Whether this machine is fit to train in parallel, mode by mode.
    modes               Which modes run on this machine, and how to start them.
    verify              Compare modes step by step with the single-device computation that each must equal.
    chaos               Kill, stop and resize small trainings at random, and check that nothing is lost.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run a subcommand.

    Args:
        args: Arguments as on the command line; by default those of the process.

    Raises:
        SystemExit: With status 2 and at most five lines on stderr if the user's input cannot work; with its own
            status after a command that is not Lightning's.
    """
    words = sys.argv[1:] if args is None else list(args)
    if process_rank() or is_torchelastic_launched():
        end_with_launcher()
    with _left_as_found():
        outlast_readers()
        try:
            _run(words, args=None if args is None else words)
        except ConfigError as error:
            refuse(str(error), status=1 if isinstance(error, SaveError) else 2)


def _run(words: list[str], *, args: list[str] | None) -> None:
    """The command that `words` name; `args` are the same if they are not the process's own."""
    if words and words[0] in COMMANDS:
        raise SystemExit(COMMANDS[words[0]](words[1:]))
    check_command(words)
    CLI(words, args=args)


class CLI(LightningCLI):
    """Adds a run folder, and finds the user's mistakes before any process is started.

    Attributes:
        position: Position of the run that is resumed in its own folder; empty for a new run.
        receipt: Data receipt of the checkpoint that a fit is resumed from.
        checkpoint: What was read from it, until it has been compared with the model.
        has_weights: Whether the checkpoint holds weights alone, with which the network starts.
        own_loggers: The loggers that the user has asked for, as parsed.
    """

    position: dict[str, Any] = {}  # noqa: RUF012  # replaced, never changed
    receipt: Receipt | None = None
    checkpoint: dict[str, Any] | None = None
    has_weights = False
    own_loggers: list[Namespace] = []  # noqa: RUF012  # likewise

    def __init__(self, words: Sequence[str], *, args: list[str] | None) -> None:
        self._named = next((word for word in words[:1] if word in self.subcommands()), None)
        super().__init__(
            LitResNet,
            CIFAR10DataModule,
            args=args,
            parser_class=Parser,
            parser_kwargs={
                "prog": PROGRAM,
                "description": _DESCRIPTION,
                "epilog": _EPILOG,
                "formatter_class": _HelpFormatter,
                "version": __version__,
                **{name: {"description": text} for name, text in SUBCOMMANDS.items()},
            },
            save_config_callback=_SaveConfig,
            seed_everything_default=0,
            trainer_defaults={"max_epochs": 15, "enable_model_summary": False, "callbacks": _callbacks()},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """What belongs to neither trainer, model nor data."""
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Folder that this run writes to. The default is runs/<time>-<subcommand>[-<mode>].",
        )
        parser.add_argument(
            "--resume",
            type=Literal["auto"] | None,
            default=None,
            help="With auto, resume the run in --run_dir from its newest valid checkpoint; start it if there is none.",
        )
        parser.add_lightning_class_args(BestCheckpoint, "best_checkpoint")
        parser.add_lightning_class_args(LastCheckpoint, "last_checkpoint")
        parser.add_lightning_class_args(EvaluationFigures, "figures")
        parser.add_lightning_class_args(Watchdog, "watchdog")

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning does, with our texts for the subcommands."""
        super().setup_parser(*args, **kwargs)
        replace_texts(self.parser)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if self._named not in (None, subcommand):
            return self.init_parser(**kwargs)  # adding the options of the others takes long, and nobody needs them
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        replace_texts(parser)
        cast(Parser, parser).common = COMMON[subcommand]
        action: Any
        for action in parser._actions:
            if action.dest == "model.network":
                action.extra_help = str  # "" in place of the names of all layers that torch has
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse `args`; Lightning's own step warns when a test or a notebook passes some."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Read the checkpoint, and what it says about the run; only a fit needs none.

        Replaces Lightning's own step, which overrides the user's model flags by the checkpoint's. Lightning's words
        "best" and "last" mean a checkpoint of this process. They have no meaning here: each command has its run folder.

        Raises:
            CheckpointError: There is none, it cannot be read, or it belongs to another data set.
        """
        subcommand = self.config["subcommand"]
        config = self.config[subcommand]
        if config.resume is not None:
            config.ckpt_path = _newest_checkpoint(subcommand, config)
        path = config.ckpt_path
        if path is None and subcommand == "fit":
            return
        if path is None:
            raise CheckpointError(
                f"{subcommand} needs a checkpoint: without one the network is untrained",
                remedy="pass --ckpt_path=RUN_FOLDER/checkpoints/best.ckpt",
            )
        self.checkpoint = checkpoint = read_checkpoint(Path(path))
        if holds_weights_alone(checkpoint):
            return
        if subcommand == "fit":
            self.receipt = Receipt.read(checkpoint)
        if config.resume is not None:
            self.position = checkpoint.get("position", {})

    def before_instantiate_classes(self) -> None:
        """Refuse arguments that the Trainer accepts but a run folder cannot use; tell the model about the data."""
        check_trainer(self._get(self.config, "trainer"), trains=self.config["subcommand"] == "fit")
        model, data = self._get(self.config, "model"), self._get(self.config, "data")
        source = open_dataset(data.dataset, data.root, image_size=data.image_size)
        if model.network is None:
            model.arch = model.arch or DEFAULT_ARCH
        model.num_classes = model.num_classes or len(source.classes)
        model.image_size = model.image_size or source.image_size

    def instantiate_classes(self) -> None:
        """Build data, model and trainer; an error of their constructors is a mistake in the user's input.

        The loggers are made later, when the run is known to be possible: they create folders in the run folder.
        """
        trainer = self._get(self.config, "trainer")
        self.has_run_folder = not trainer.fast_dev_run
        given = trainer.logger
        if self.has_run_folder:
            self.own_loggers = [] if given in (None, True) else as_list(given)
            trainer.logger = False
        self.save_config_kwargs = {"logger": given}
        with _refusing():
            super().instantiate_classes()
        self._check_checkpoint()
        trainer.logger = given

    def _check_checkpoint(self) -> None:
        """Compare it with the model; weights alone are loaded at once.

        Raises:
            CheckpointError: It is of another network.
        """
        if self.checkpoint is None:
            return
        header = self.model.header
        if holds_weights_alone(self.checkpoint):
            header.check_weights(self.checkpoint, any_classes=self.config["subcommand"] == "fit")
            load_weights(self.model.network, self.checkpoint)
            self.has_weights = True
        else:
            header.check(self.checkpoint)
            check_shapes(self.model.network, self.checkpoint.get("state_dict", {}))
            if self.config["subcommand"] == "predict":
                _check_classes(self.checkpoint, self.datamodule.dataset)
        self.checkpoint = None  # its file may be replaced from now on

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        # There is no training state to resume, and the model has its weights.
        return kwargs | {"ckpt_path": None} if self.has_weights else kwargs

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
        """Add the progress bar, the checkpoint plugin, and what the processes need."""
        if config["enable_progress_bar"] is not False:
            callbacks = [ProgressBar(), *callbacks]
        config["plugins"] = [*as_list(config["plugins"]), CheckpointFiles()]
        if config["sync_batchnorm"]:
            config["plugins"].append(ProcessSyncBatchNorm())
        settle_processes(config)
        try:
            trainer = super()._instantiate_trainer(config, callbacks)
        except TypeError as error:
            if "`devices`" not in str(error):
                raise
            given = f"--trainer.devices={config['devices']}"
            raise ConfigError(f"{given}: {error}", remedy="pass the number of devices: --trainer.devices=2") from error
        trainer.callbacks.sort(key=_place)  # type: ignore[attr-defined]  # Lightning's own omission
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        check_processes(self.trainer, rank=process_rank())
        if process_rank() == 0:
            self._check(subcommand)
        folder = self._make_run_folder(subcommand) if self.has_run_folder else None
        if process_rank() == 0:
            report = next(c for c in self.trainer.callbacks if isinstance(c, RunReport))  # type: ignore[attr-defined]
            report.announce(self.trainer, self.model, self.datamodule, stage=subcommand)
        # Lightning converts after loading a checkpoint, when its float64 weights have already been rounded.
        self.trainer.precision_plugin.convert_module(self.model)
        with _signals_to_spawned(self.trainer), _reporting_disk(folder):
            super()._run_subcommand(subcommand)

    def _make_run_folder(self, subcommand: str) -> Path:
        """Make the folder and the loggers that write into it; ours come first, as the first one names the folder."""
        mode = str(self._get(self.config, "trainer").strategy)
        label = subcommand if mode == "auto" or not mode.isidentifier() else f"{subcommand}-{mode}"
        resume = self._get(self.config, "resume") is not None
        folder = create_run_folder(self._get(self.config, "run_dir"), label=label, resume=resume)
        first_step = self.position.get("global_step", 0) if resume else None
        ours = run_loggers(folder, kept_rows=self.position.get("rows", 0), first_step=first_step)
        try:
            with _refusing():
                self.trainer.loggers = [*ours, *(logger_below(folder, given) for given in self.own_loggers)]
        except ConfigError:
            with suppress(OSError):
                folder.rmdir()  # nothing was written
            raise
        return folder

    def _check(self, subcommand: str) -> None:
        """Find mistakes in one process before others are started; `Trainer` would find them in each process."""
        if self.trainer.world_size == 1 and self._get(self.config, "trainer").sync_batchnorm:
            rank_zero_warn("--trainer.sync_batchnorm=true has no effect with one process, which sees the whole batch")
        check_kernels(self.trainer, self._get(self.config, "trainer"), compiles=self.model.compiles)
        layout = Layout.of(self.trainer.strategy)
        if self._get(self.config, "model").ghost_batchnorm is not None and layout != Layout():
            raise ConfigError(
                f"--model.ghost_batchnorm computes on one device what a mode does, and this run has a mode: {layout}",
                remedy="leave it out, or leave out --trainer.strategy and pass --trainer.devices=1",
            )
        known = {"num_classes": len(self.datamodule.classes), "image_size": self.datamodule.image_size}
        for name, value in known.items():
            if (asked := getattr(self.model.header, name)) != value:
                raise ConfigError(
                    f"--model.{name}={asked}, but {self.datamodule.name} has {value}",
                    remedy=f"pass --model.{name}={value}, or leave it out",
                )
        if self.model.header.network is not None:
            check_network(self.model.network, self.model.image_shape, num_classes=known["num_classes"])
        if subcommand == "fit":
            with _refusing():  # arguments such as a negative learning rate; the fit makes both anew
                optimizer = self.model.make_optimizer(self.model.network.parameters())
                self.model.make_lr_scheduler(optimizer)
            check_clipping(self.trainer, optimizer)
        self.trainer.strategy.connect(self.model)  # a strategy that splits the network does so here
        self.datamodule.trainer = self.trainer
        self.datamodule.prepare_data()
        self.datamodule.setup(subcommand)
        if subcommand == "fit":
            sampler = self.datamodule.train_sampler()
            sampler.check()
            if self.receipt is not None:
                sampler.set_epoch(self.receipt.epoch)
                data = self.datamodule
                self.receipt.check(sampler, order_settings(sampler, dataset=data.dataset, val_size=data.val_size))


class _HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the epilog."""


class _SaveConfig(SaveConfigCallback):
    """Saves the resolved configuration, without the flags that tie it to this run.

    These are `run_dir`, `resume` and, of a fit, `ckpt_path`: a command that reads the file has a run folder of its own
    and names its checkpoint itself. A resumed run replaces the file at its first step, so that a run that is refused or
    has no step left does not.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, *, logger: Any, **kwargs: Any) -> None:
        super().__init__(parser, config.clone(), **kwargs)
        self.overwrite = config.resume is not None  # the file of the run before it was interrupted
        self._resumed = self.overwrite and config.ckpt_path is not None
        self.config.run_dir = self.config.resume = None
        self.config.trainer.logger = logger

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Save, unless the run is resumed."""
        if stage == "fit":
            self.config.ckpt_path = None
        if not self._resumed:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, if that was not done in `setup`."""
        super().setup(trainer, pl_module, "fit")


def _callbacks() -> list[L.Callback]:
    """The callbacks of every run; `--trainer.callbacks` adds to them."""
    return [
        StepBoundary(),
        ExactResume(),
        SampleAudit(),
        LearningRateMonitor(),
        Throughput(),
        PerRankAccuracy(),
        ModelGraph(),
        FinalSettings(),
        PredictionWriter(),
        RunReport(),
    ]


def _place(callback: L.Callback) -> int:
    """Sort key of callbacks: `StepBoundary` first, then the watchdog, which notes phases, then all others.

    Those that save come last, because their state must be the last to change. Ours come before other checkpoint
    callbacks, because the run's summary names the first one's files.
    """
    kinds: tuple[Any, ...] = (StepBoundary, Watchdog, BestCheckpoint, LastCheckpoint, Checkpoint)
    places = (0, 1, 3, 4, 5)
    return next((place for place, kind in zip(places, kinds, strict=True) if isinstance(callback, kind)), 2)


@contextmanager
def _left_as_found() -> Iterator[None]:
    """Put this process's loggers, warning filters, streams and signal handlers back at the end."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: handler for number in signals if (handler := signal.getsignal(number)) is not None}
    with without_banners(), redirect_stdout(sys.stdout), redirect_stderr(sys.stderr):
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler)


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn what a class raises into a `ConfigError`: the user has chosen the class or its arguments."""
    try:
        yield
    except ConfigError:
        raise
    except (ImportError, MisconfigurationException, ValueError) as error:
        raise as_config_error(error) from error


def _check_classes(checkpoint: dict[str, Any], dataset: str) -> None:
    """Refuse to `predict` with the class names and the normalisation of another data set than the checkpoint's."""
    receipt = Receipt.read(checkpoint)
    trained_on = dataset if receipt is None else receipt.settings["dataset"]
    if trained_on != dataset:
        raise CheckpointError(
            f"the checkpoint was trained on {trained_on}, not on {dataset}: classes and normalisation differ",
            remedy=f"pass --data.dataset={str(trained_on).partition(' ')[0]}, or --config RUN_FOLDER/config.yaml",
        )


def _newest_checkpoint(subcommand: str, config: Namespace) -> str | None:
    """The checkpoint that `--resume=auto` resumes from; None if there is none yet.

    Raises:
        ConfigError: The command is not `fit`, names no run folder, or names a checkpoint as well.
        CheckpointError: There are checkpoints, but none is valid.
    """
    flags = f"--resume={config.resume}"
    if subcommand != "fit":
        raise ConfigError(f"{flags} resumes a training, and this is {subcommand}", remedy="leave it out")
    if config.run_dir is None:
        raise ConfigError(f"{flags} must know which run to resume", remedy="pass --run_dir=RUN_FOLDER")
    if config.ckpt_path is not None:
        raise ConfigError(
            f"{flags} takes the newest checkpoint, but --ckpt_path={config.ckpt_path} names one",
            remedy="leave one of the two out",
        )
    path, refused = newest_valid(Path(config.run_dir) / "checkpoints")
    if refused and path is None:
        raise CheckpointError(
            "\n".join(refused), remedy="restore one of them, or start a new run in another folder: --run_dir=FOLDER"
        )
    for problem in refused:
        rank_zero_warn(f"{flags} skips a checkpoint: {problem}")
    rank_zero_info(f"{flags}: " + (f"resuming from {path}" if path else f"starting a new run in {config.run_dir}"))
    return None if path is None else str(path)


@contextmanager
def _reporting_disk(folder: Path | None) -> Iterator[None]:
    """Turn errors of the disk below the run folder into a short `SaveError`: the loggers write in many places."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename or folder or ""))
        if folder is None or error.errno not in _DISK or not path.absolute().is_relative_to(folder.absolute()):
            raise
        raise save_error(error, path, checkpoints=folder / "checkpoints") from error


_DISK = (errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


@contextmanager
def _signals_to_spawned(trainer: L.Trainer) -> Iterator[None]:
    """Forward a request to stop to the processes of `ddp_spawn`, and take over their exit status.

    While they are being started, and at a second Ctrl-C, they are killed at once.
    """
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, _MultiProcessingLauncher):
        yield
        return
    keystrokes = Keystrokes()

    def stop(number: int, frame: FrameType | None) -> None:
        if launcher.procs and not keystrokes.insist(number):
            launcher.kill(signal.SIGTERM)
            return
        for process in active_children():  # the launcher knows its processes only when it has started all
            process.kill()
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except ProcessExitedException as error:
        if error.exit_code not in (EXIT_STOPPED, -signal.SIGTERM):  # SIGTERM came before its handler was installed
            raise
        raise SystemExit(EXIT_STOPPED) from None
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
