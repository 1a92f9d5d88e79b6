"""The optimizer and the schedule of a run: made as the user asks, scaled by the batch, tried, and kept in a resume."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from lit_cifar.checkpoint.exact_resume import steps_of
from lit_cifar.checkpoint.format import OPTIMIZER, SCHEDULE, SETTINGS, class_path, holds_training
from lit_cifar.data.datamodule import CIFAR10DataModule, batches_of_epoch
from lit_cifar.errors import ConfigError, bounded
from lit_cifar.models.fine_tuning import FineTuning
from lit_cifar.models.memory_format import follow_parameters
from lit_cifar.task.optim import Recipe, WarmupDecay, check_total_steps, followed_metric, keep_saved_types
from lit_cifar.task.refused_callbacks import check_followed


@dataclass(frozen=True, kw_only=True)
class RateScaling:
    """Scaling of the learning rate with the global batch.

    Args:
        rule: "linear" (Goyal et al., 2017) multiplies the rate by batch_size / base_batch_size, "sqrt" by the square
            root of that, "none" by 1.
        base_batch_size: The global batch size that the learning rate was chosen for.
    """

    rule: Literal["none", "linear", "sqrt"] = "none"
    base_batch_size: int = 512

    def __post_init__(self) -> None:
        bounded("--model.rate_scaling.base_batch_size", self.base_batch_size, 1)

    def factor(self, data: Any) -> float:
        if self.rule == "none":
            return 1.0
        ratio: float = data.batch_size / self.base_batch_size
        return ratio if self.rule == "linear" else ratio**0.5


class Optimization:
    """Makes the optimizer and the schedule, and lets their settings hold in a run that is resumed."""

    def __init__(
        self,
        make_optimizer: OptimizerCallable,
        make_lr_scheduler: LRSchedulerCallable,
        *,
        fine_tuning: FineTuning,
        rate_scaling: RateScaling,
        num_classes: int,
    ) -> None:
        if None in (make_optimizer, make_lr_scheduler):  # jsonargparse lets a file say null
            problem = "--model.optimizer=null or --model.lr_scheduler=null: a training has both"
            remedy = "leave it out, or pass --model.lr_scheduler=ConstantLR --model.lr_scheduler.factor=1 to keep it"
            raise ConfigError(problem, remedy=remedy)
        self.make_optimizer, self.make_lr_scheduler = make_optimizer, make_lr_scheduler
        self.head_lr, self._rate_scaling = fine_tuning.head_lr, rate_scaling
        self._fine_tuning, self._num_classes = fine_tuning, num_classes
        self._recipe: Recipe | None = None
        self._resumes = False  # whether a training goes on, until it starts
        self._before: dict[str, Any] | None = None  # its settings, if its checkpoint has some

    def parameter_groups(self, network: nn.Module) -> Any:
        return self._fine_tuning.parameter_groups(network, self._num_classes)

    def new_optimizer(self, network: nn.Module) -> Optimizer:
        """The user's optimizer before its first step."""
        try:
            optimizer = self.make_optimizer(self.parameter_groups(network))
        except (AttributeError, TypeError) as error:
            if self.head_lr is None:
                raise
            problem = f"--model.fine_tuning.head_lr={self.head_lr}: the optimizer takes no parameter groups ({error})"
            raise ConfigError(problem, remedy="leave it out, or pass another --model.optimizer") from error
        if isinstance(optimizer, LBFGS):
            problem = "--model.optimizer=LBFGS computes a batch several times in a step, and each time would be counted"
            raise ConfigError(problem, remedy="pass another --model.optimizer")
        return optimizer

    def new_scheduler(self, optimizer: Optimizer) -> Any:
        """The user's schedule before its first step."""
        scheduler = self.make_lr_scheduler(optimizer)
        if isinstance(scheduler, CyclicLR | OneCycleLR) and (self.head_lr, self._rate_scaling.rule) != (None, "none"):
            problem = f"--model.lr_scheduler={type(scheduler).__name__} has rates of its own for all parameters"
            raise ConfigError(problem, remedy="leave out --model.fine_tuning.head_lr and --model.rate_scaling.rule")
        return scheduler

    def tried(self, network: nn.Module) -> tuple[Optimizer, Any]:
        """Make the user's optimizer and schedule, and let the schedule take a step; the fit makes both anew."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the schedule's step comes before the optimizer's
            optimizer = self.new_optimizer(network)
            scheduler: Any = self.new_scheduler(optimizer)
            try:
                scheduler.step(*([0.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
            except ArithmeticError as error:
                problem = f"--model.lr_scheduler={type(scheduler).__name__} cannot take a step: {error}"
                raise ConfigError(problem, remedy="correct its arguments: --model.lr_scheduler.NAME=VALUE") from error
        return optimizer, scheduler

    def in_words(self, network: nn.Module, data: Any) -> str:
        """The optimizer and its learning rate: one that is named without a rate has the default's."""
        optimizer = self.new_optimizer(network)
        rate = optimizer.param_groups[0]["lr"] * self._rate_scaling.factor(data)
        return f"{type(optimizer).__name__}, learning rate {rate:.4g}"

    def configure(self, network: nn.Module, trainer: Any, *, label_smoothing: float) -> dict[str, Any]:
        """What Lightning's `configure_optimizers` returns: rates scaled, and the schedule planned over the run."""
        optimizer = self.new_optimizer(network)
        keep_saved_types(optimizer)
        optimizer.register_load_state_dict_post_hook(follow_parameters)
        factor = self._rate_scaling.factor(trainer.datamodule)
        for group in optimizer.param_groups:
            group["lr"] *= factor
        scheduler = self.new_scheduler(optimizer)
        if (rule := self._rate_scaling.rule) != "none":
            peak = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])
            rank_zero_info(f"learning rate x {factor:.4g} = {peak:.4g}: {rule} scaling by the global batch")
        total_steps = trainer.estimated_stepping_batches
        check_total_steps(scheduler, total_steps)
        if isinstance(scheduler, WarmupDecay):
            scheduler.set_total_steps(int(total_steps))
        self._recipe = Recipe(optimizer, scheduler, label_smoothing=label_smoothing)
        planned = {"scheduler": scheduler}
        if isinstance(scheduler, ReduceLROnPlateau):
            planned["monitor"] = followed_metric(scheduler)
        if isinstance(scheduler, WarmupDecay | OneCycleLR | CyclicLR):
            planned["interval"] = "step"
        return {"optimizer": optimizer, "lr_scheduler": planned}

    def forget(self) -> None:
        """Begin anew: no training goes on."""
        self._resumes = False

    def start(self, trainer: Any) -> None:
        """Use this run's own settings of optimizer and schedule where those of a resumed training differ."""
        if self._resumes and self._recipe is not None:
            planned, taken = trainer.lr_scheduler_configs[0], None
            ends_by_epochs = trainer.max_steps != trainer.estimated_stepping_batches
            if planned.interval == "step" and ends_by_epochs:
                # Earlier epochs may have had other batches; the schedule is made of steps of this run.
                taken = trainer.current_epoch * steps_of(trainer, trainer.num_training_batches)
                taken += steps_of(trainer, batches_of_epoch(trainer))
            step, optimizer = trainer.global_step, trainer.optimizers[0]
            self._recipe.resume(optimizer, planned.scheduler, before=self._before, step=step, taken=taken)
        self._resumes, self._before = False, None

    def save(self, checkpoint: dict[str, Any], trainer: Any) -> None:
        """Name the states of optimizer and schedule in a checkpoint, and add the settings that they were made with."""
        if self._recipe is not None:  # otherwise a subclass has made them
            scheduler = trainer.lr_scheduler_configs[0].scheduler
            checkpoint |= {OPTIMIZER: class_path(trainer.optimizers[0]), SCHEDULE: class_path(scheduler)}
            checkpoint[SETTINGS] = self._recipe.settings()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Note the settings of the training that goes on from a checkpoint, if it holds one."""
        found = checkpoint.get(SETTINGS)
        self._resumes, self._before = holds_training(checkpoint), found if isinstance(found, dict) else None


def check_schedule(
    scheduler: Any, trainer: Trainer, data: CIFAR10DataModule, *, num_batches: int, scores: Iterable[str]
) -> None:
    """Refuse a schedule that does not fit `num_batches` batches in an epoch, and `scores` of an evaluation."""
    check_total_steps(scheduler, _total_steps(trainer, num_batches))
    if isinstance(scheduler, ReduceLROnPlateau):
        metric = followed_metric(scheduler)
        check_followed("--model.lr_scheduler", metric, scheduler.mode, trainer, scores)
        _check_validated(metric, trainer, data, num_batches=num_batches)


def _total_steps(trainer: Trainer, num_batches: int) -> float:
    """The `estimated_stepping_batches` of epochs of so many: a Trainer says so once all processes have met."""
    most = trainer.max_steps if trainer.max_steps >= 0 else math.inf
    epochs = math.inf if trainer.max_epochs == -1 else max(trainer.max_epochs or 1, 1)
    return min(most, -(-num_batches // trainer.accumulate_grad_batches) * epochs)


def _check_validated(metric: str, trainer: Any, data: CIFAR10DataModule, *, num_batches: int) -> None:
    """Refuse a schedule that follows a validation which does not come in each epoch."""
    every, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    is_seldom = (every or 1) > 1 or (isinstance(interval, int) and interval > num_batches)
    if metric.startswith("val/") and (is_seldom or not data.val_size or not trainer.limit_val_batches):
        problem = f"--model.lr_scheduler=ReduceLROnPlateau follows {metric} after each epoch, and not each is validated"
        own = "--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau --model.lr_scheduler.monitor=train/loss"
        raise ConfigError(problem, remedy=f"validate after each epoch, or follow the training:\n{own}")
