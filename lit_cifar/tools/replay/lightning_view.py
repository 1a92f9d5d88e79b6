"""What the copy of a LightningModule sees of its trainer in a replay, and what Lightning does around a step."""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar.tools.replay.exchange import process_groups
from lit_cifar.tools.replay.recording import parameters_of
from lit_cifar.tools.replay.verdict import Report


def is_a(its: Any, *names: str) -> bool:
    """By its classes' names, as those of `lightning.pytorch` and of `pytorch_lightning` are not the same."""
    return any(kind.__name__ in names for kind in type(its).__mro__)


def empty_report(trainer: pl.Trainer, subject: str = "") -> Report:
    return Report(
        strategy=type(trainer.strategy).__name__,
        num_ranks=trainer.world_size,
        precision=str(trainer.precision),
        first_step=trainer.global_step,
        subject=subject,
    )


def step_states(trainer: pl.Trainer) -> list[Any]:
    """Of callbacks that decide what a step computes beside its inputs: what their method `step_state` returns."""
    return [callback.step_state() for callback in _with_step_state(trainer)]


def load_step_states(trainer: pl.Trainer, states: list[Any]) -> None:
    for callback, state in zip(_with_step_state(trainer), states, strict=True):
        callback.load_step_state(state)


def _with_step_state(trainer: pl.Trainer) -> list[Any]:
    return [callback for callback in trainer.callbacks if hasattr(callback, "step_state")]  # type: ignore[attr-defined]


def progress_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What a replayed step sees of its trainer, and by what its loss is multiplied."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale()
    return {
        "current_epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "loss_scale": scale,
        "callbacks": step_states(trainer),
    }


class Repeats(Protocol):
    """What takes the place of a module's own backward passes and steps."""

    def backward_inside(self, loss: Tensor, *args: Any, **kwargs: Any) -> None: ...

    def step_inside(self, optimizer: Optimizer) -> None: ...


class TrainerView:
    """The trainer as `training_step` sees it in a replay: to be read, with the counters of the step."""

    def __init__(self, trainer: pl.Trainer, optimizers: list[Optimizer]) -> None:
        self.optimizers, self._trainer = optimizers, trainer
        self.current_epoch = self.global_step = 0
        self.loss_scale = 1.0
        self.precision_plugin = copy.copy(trainer.precision_plugin)
        # A strategy may have put its own in this place, which asks other ranks; the copy has whole gradients.
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)

    def follow(self, progress: dict[str, Any]) -> None:
        load_step_states(self._trainer, progress["callbacks"])
        vars(self).update({name: value for name, value in progress.items() if name != "callbacks"})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class _OptimizerView:
    """What `self.optimizers()` returns in a replay."""

    def __init__(self, optimizer: Optimizer, replayer: Repeats, module: Any) -> None:
        self.optimizer, self._replayer, self._module = optimizer, replayer, module

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        if closure is not None:
            closure()
        self._replayer.step_inside(self.optimizer)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Any:
        self._module.toggle_optimizer(self.optimizer)
        yield
        self._module.untoggle_optimizer(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def detach(module: nn.Module, view: TrainerView, replayer: Repeats) -> None:
    """Let a copy of a LightningModule compute without logging anything and without its trainer's optimizers."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    schedule = SimpleNamespace(step=nothing, get_last_lr=lambda: [], state_dict=dict)
    for its in module.modules():
        if is_a(its, "LightningModule"):
            wrapped = [_OptimizerView(optimizer, replayer, its) for optimizer in view.optimizers]
            views = wrapped[0] if len(wrapped) == 1 else wrapped
            vars(its).update(
                _trainer=view,
                log=nothing,
                log_dict=nothing,
                print=nothing,
                manual_backward=replayer.backward_inside,
                optimizers=lambda use_pl_optimizer=True, views=views: views,
                lr_schedulers=lambda: schedule,
            )


def quiet_copy(module: pl.LightningModule, *, view: TrainerView, replayer: Repeats) -> pl.LightningModule:
    """One more copy, which has no logger either."""
    kept = (view, replayer, *process_groups())
    its = copy.deepcopy(module, {id(one): one for one in kept})
    quiet = TrainerView(view._trainer, view.optimizers)
    vars(quiet).update(vars(view), logger=None, loggers=[])
    detach(its, quiet, replayer)
    return its


def has_own_backward(module: pl.LightningModule) -> bool:
    """Whether it overrides Lightning's `backward`, and so may multiply the loss."""
    return next(kind for kind in type(module).__mro__ if "backward" in vars(kind)).__name__ != "LightningModule"


def before_step(module: pl.LightningModule, trainer: pl.Trainer, optimizer: Optimizer) -> None:
    """What Lightning does between the backward pass and the optimizer's step."""
    scale = module.trainer.loss_scale  # type: ignore[attr-defined]  # of a `TrainerView`
    if scale != 1:
        inverse = torch.tensor(scale).double().reciprocal().float()  # as a GradScaler computes it
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(inverse)
    module.on_before_optimizer_step(optimizer)
    if module.automatic_optimization:
        module.configure_gradient_clipping(
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )
