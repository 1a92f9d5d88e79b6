"""What a command starts from: nothing, or a checkpoint that must fit the model. What compares both is loaded then."""

import shlex
from dataclasses import asdict
from hashlib import file_digest
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_cifar.checkpoint import atomic
from lit_cifar.checkpoint.content import check_content
from lit_cifar.checkpoint.exact_resume import Position, StartingPoint, check_counts
from lit_cifar.checkpoint.format import AVERAGED, SETTINGS, TrainedOn, holds_training, is_own, naming, read_checkpoint
from lit_cifar.checkpoint.sample_audit import AuditRecord
from lit_cifar.cli.paths import expanded
from lit_cifar.cli.usage_errors import as_config_error
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.dataset import Dataset
from lit_cifar.data.sample_order import OrderSettings, order_settings, settings_in
from lit_cifar.errors import CheckpointError, ConfigError, DataError
from lit_cifar.reporting.run_folder import CONFIG, process_rank, read_config
from lit_cifar.task.module import LitResNet
from lit_cifar.task.optim import Recipe


def spelled_out(words: list[str]) -> list[str]:
    """`words` with the flags that a run folder stands for in `test RUN_FOLDER`: its settings and best checkpoint."""
    if len(words) == 1 or words[1].startswith("-"):
        return words
    command, folder, *flags = words
    folder = expanded(folder, given=folder)
    checkpoint = atomic.best_of(Path(folder))
    read_config(Path(folder))  # refuses a file that would take all memory, or time
    return [command, f"--config={Path(folder, CONFIG)}", f"--ckpt_path={checkpoint}", *flags]


class Start:
    """The checkpoint that a command starts from, read before the model is made; a fit needs none.

    With `--resume=auto` there may be none yet; otherwise the `ckpt_path` of `config` is set.
    """

    def __init__(self, subcommand: str, config: Namespace) -> None:
        self.point = StartingPoint(None, "no checkpoint")
        self.position: dict[str, Any] = {}  # position of the run that is resumed in its own folder; empty for a new run
        self._order: OrderSettings | None = None  # of the training before a fit or a validation
        self._step = 0  # optimizer steps that were taken in the epoch within which the position is
        self._content: dict[str, Any] | None = None
        self._config, self._fits = config, subcommand == "fit"
        self._subcommand = subcommand
        if config.resume is not None:
            config.ckpt_path, refused = _newest(subcommand, config)
            self.point = StartingPoint(None, "; ".join(["no checkpoint", *refused]))
        if config.ckpt_path is not None:
            self._content = self._read(Path(config.ckpt_path))
        elif not self._fits:
            problem = f"{subcommand} needs a checkpoint: without one the network is untrained"
            command = f"python -m lit_cifar {subcommand} RUN_FOLDER"
            raise CheckpointError(problem, remedy=f"{command}, or pass --ckpt_path=FILE")

    def _read(self, path: Path) -> dict[str, Any]:
        content = read_checkpoint(path, mapped=True)
        step = content.get("global_step")
        at = f" after {step} optimizer steps" if isinstance(step, int) else ""
        with path.open("rb") as file:
            self.point = StartingPoint(file_digest(file, "sha256").hexdigest(), f"{path}{at}")
        if not is_own(content) or (self._fits and not holds_training(content)):
            raise CheckpointError(f"{path} holds no training of this program", remedy=_start_from(path))
        if self._subcommand in ("fit", "validate"):
            self._order = settings_in(content)
            if self._order is None:
                rank_zero_warn("the checkpoint does not say which images it was trained on: they are not compared")
        if self._fits:
            with naming(path):
                position = Position.read(content)
                audit = AuditRecord.read(content)
                if audit is not None and not audit.agrees_with(position.epoch, position.step):
                    raise CheckpointError("its sample audit is of another step than its position")
                _check_length(position, self._config.trainer)
            self._step = position.step
            self.position = {} if self._config.resume is None else asdict(position)
        return content

    def name_classes(self, data: Dataset) -> None:
        """Let `data` do without the pictures of the training, if the checkpoint names their classes."""
        try:
            _ = data.classes
        except DataError as error:
            trained = TrainedOn.read(self._content or {})
            if trained is None:
                raise
            data.classes = trained.classes
            rank_zero_info(f"{error.problem}: the names of the classes are those in the checkpoint")

    def check(self, module: LitResNet, data: CIFAR10DataModule, trainer: Trainer) -> None:
        """Refuse a checkpoint of a different network or different classes; without one, load weights that are given."""
        content, self._content = self._content, None  # the file may be replaced from now on
        if content is None:
            module.start_from_weights()
            return
        if self._fits and module.weights is not None:
            flag, module.weights = f"--model.fine_tuning.weights={module.weights}", None
            rank_zero_info(f"{flag} is not read: the training goes on with the weights in {self._config.ckpt_path}")
        with naming(self._config.ckpt_path):
            self._compare(content, module, data, trainer)

    def compare_images(self, data: CIFAR10DataModule, *, steps: int) -> None:
        """Refuse to go on with other images, or within an epoch that has fewer `steps`."""
        if self._order is None:
            return
        from lit_cifar.data.changed_order import check_held_out, check_rest_of_epoch

        now = order_settings(data)
        with naming(self._config.ckpt_path):
            check_content(self._order, now, "settings of the data", partly=True)
            if self._step:
                check_rest_of_epoch(self._order, now)
                if self._step > steps:
                    raise CheckpointError(f"its position is step {self._step} of an epoch, which has {steps}")
            check_held_out(self._order, now)

    def _compare(self, content: dict[str, Any], module: LitResNet, data: CIFAR10DataModule, trainer: Trainer) -> None:
        from lit_cifar.checkpoint import compatibility

        try:
            now = TrainedOn(data.dataset, data.classes)
            compatibility.check_classes(content, now, normalised=self._subcommand == "predict")
        except CheckpointError as error:
            if not self._fits or self._config.resume is not None:
                raise
            start = _start_from(self._config.ckpt_path)
            raise CheckpointError(error.problem, remedy=f"{error.remedy},\nor {start}") from error
        compatibility.check_header(content, module.header)
        check_content(content.get(type(data).__qualname__, {}), {}, "settings of the data")
        weights = content.get("state_dict", {})
        trained = {name.removeprefix("network."): each for name, each in content.get(AVERAGED, weights).items()}
        for each in (weights, trained):
            compatibility.check_shapes(module.network, each)
            problem = compatibility.wrong_values(module.network, each) if process_rank() == 0 else ""
            if problem and self._fits:
                raise CheckpointError(problem)  # no training has such values
            if problem:
                rank_zero_warn(f"{self._config.ckpt_path}: {problem}. What the network answers means nothing")
        if self._fits:
            with as_config_error():
                optimizer = module.optimization.new_optimizer(module.network)
                scheduler = module.optimization.new_scheduler(optimizer)
            compatibility.check_optimizer(content, optimizer, scheduler)
            if process_rank() == 0:  # which reads all numbers
                check_content(content.get(SETTINGS, {}), Recipe(optimizer, scheduler).settings(), SETTINGS, partly=True)
                check_counts(content, module)
                compatibility.check_states(content, trainer, optimizer, scheduler)


def check_unasked_resume(trainer: Any) -> None:
    """Refuse a fit that Lightning would begin with a file that another has left."""
    saving = [c for c in trainer.callbacks if isinstance(c, OnExceptionCheckpoint)]
    left = [Path(callback.ckpt_path) for callback in saving if Path(callback.ckpt_path).exists()]
    if SLURMEnvironment.detect():
        left += sorted(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"))
    if left:
        problem = f"{left[-1]} is there, and Lightning would resume from it unasked"
        raise ConfigError(problem, remedy="move it, and pass it as --ckpt_path to go on from it")


def _start_from(path: str | Path) -> str:
    weights = shlex.quote(f"--model.fine_tuning.weights={path}")
    return f"start a new training with its weights alone, in place of --ckpt_path or --resume: {weights}"


def _check_length(position: Position, trainer: Namespace) -> None:
    """Refuse to resume a training that is already longer than it may become; one of equal length ends at once."""
    begun = position.epoch + (position.step > 0)
    for name, done in {"max_epochs": begun, "max_steps": position.global_step}.items():
        if trainer[name] is not None and 0 <= trainer[name] < done:
            problem = f"--trainer.{name}={trainer[name]}, and the training that it continues has begun {done} already"
            raise CheckpointError(problem, remedy=f"pass --trainer.{name}={done} or more, or test the checkpoint")


def _newest(subcommand: str, config: Namespace) -> tuple[str | None, list[str]]:
    """The checkpoint that `--resume=auto` resumes from, None if there is none yet; and why newer ones were refused.

    If all were refused, rank 0 raises. The other ranks report what they have seen when the processes have met.
    """
    flags = f"--resume={config.resume}"
    if subcommand != "fit":
        raise ConfigError(f"{flags} resumes a training, and this is {subcommand}", remedy="leave it out")
    if config.run_dir is None:
        raise ConfigError(f"{flags} must know which run to resume", remedy="pass --run_dir=RUN_FOLDER")
    if config.ckpt_path is not None:
        problem = f"{flags} takes the newest checkpoint, and --ckpt_path={config.ckpt_path} names one"
        raise ConfigError(problem, remedy="leave one of the two out")
    path, refused = atomic.newest_valid(Path(config.run_dir) / "checkpoints")
    if refused and path is None and process_rank() == 0:
        raise CheckpointError("\n".join(refused), remedy="restore one, or start a new run: --run_dir=FOLDER")
    for problem in refused:
        rank_zero_warn(f"{flags} skips a checkpoint: {problem}")
    rank_zero_info(f"{flags}: " + (f"resuming from {path}" if path else f"starting a new run in {config.run_dir}"))
    return None if path is None else str(path), refused
