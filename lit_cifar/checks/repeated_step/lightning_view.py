"""The trainer that a copy of a LightningModule sees in a replay, and Lightning's own work around a step."""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar.checks.repeated_step.exchange import process_groups
from lit_cifar.mode.tensors import parameters_of


def not_replayed(trainer: pl.Trainer) -> list[str]:
    """The attribute `not_replayed` of each callback that has one: the reason why no step can be repeated with it."""
    reasons = (getattr(callback, "not_replayed", "") for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return [*filter(None, reasons)]


def step_states(trainer: pl.Trainer) -> list[Any]:
    """The `step_state()` of each callback that decides the result of a step beside its inputs."""
    return [callback.step_state() for callback in _with_step_state(trainer)]


def load_step_states(trainer: pl.Trainer, states: list[Any]) -> None:
    for callback, state in zip(_with_step_state(trainer), states, strict=True):
        callback.load_step_state(state)


def _with_step_state(trainer: pl.Trainer) -> list[Any]:
    return [callback for callback in trainer.callbacks if hasattr(callback, "step_state")]  # type: ignore[attr-defined]


@runtime_checkable
class WritesSteps(Protocol):
    """A callback that writes steps down, which nobody else should repeat meanwhile."""

    def writes_down(self, trainer: pl.Trainer) -> bool:
        """Whether the step that begins is, or may be, written down."""


def is_written_down(trainer: pl.Trainer) -> bool:
    """Whether a callback writes down the step that begins."""
    writers = (each for each in trainer.callbacks if isinstance(each, WritesSteps))  # type: ignore[attr-defined]
    return any(each.writes_down(trainer) for each in writers)


def progress_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The trainer's counters for a replayed step, and the factor of its loss."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale()
    counters = {"current_epoch": trainer.current_epoch, "global_step": trainer.global_step}
    return counters | {"loss_scale": scale, "callbacks": step_states(trainer)}


class Repeats(Protocol):
    """Stands in for a module's own backward passes and steps."""

    def backward_inside(self, loss: Tensor, *args: Any, **kwargs: Any) -> None: ...

    def step_inside(self, optimizer: Optimizer) -> None: ...


class _SilentLogger:
    """A logger that tells its folder and names, and writes nothing."""

    experiment = DummyLogger().experiment

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["_own"], name)
        return (lambda *_, **__: None) if callable(value) else value


class TrainerView:
    """The trainer that `training_step` sees in a replay: read-only, with the counters of the step."""

    def __init__(self, trainer: pl.Trainer, optimizers: list[Optimizer]) -> None:
        self.optimizers, self._trainer = optimizers, trainer
        self.current_epoch = self.global_step = 0
        self.loss_scale = 1.0
        self.loggers = [_SilentLogger(logger) for logger in trainer.loggers]
        self.logger = self.loggers[0] if self.loggers else None
        self.precision_plugin = copy.copy(trainer.precision_plugin)
        # A strategy may have put in its own function, which asks other ranks; the copy has whole gradients.
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)

    def follow(self, progress: dict[str, Any]) -> None:
        load_step_states(self._trainer, progress["callbacks"])
        vars(self).update({name: value for name, value in progress.items() if name != "callbacks"})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class _OptimizerView:
    """The optimizer that `self.optimizers()` returns in a replay."""

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
    for part in module.modules():
        # `lightning.pytorch` and `pytorch_lightning` share no class.
        if any(kind.__name__ == "LightningModule" for kind in type(part).__mro__):
            wrapped = [_OptimizerView(optimizer, replayer, part) for optimizer in view.optimizers]
            views = wrapped[0] if len(wrapped) == 1 else wrapped
            vars(part).update(dict.fromkeys(("log", "log_dict", "print"), nothing))
            vars(part).update(
                _trainer=view,
                manual_backward=replayer.backward_inside,
                optimizers=lambda use_pl_optimizer=True, views=views: views,
                lr_schedulers=lambda: schedule,
            )


def quiet_copy(module: pl.LightningModule, *, view: TrainerView, replayer: Repeats) -> pl.LightningModule:
    """Make one more copy, which has no logger either."""
    kept = (view, replayer, *process_groups())
    copied = copy.deepcopy(module, {id(one): one for one in kept})
    quiet = TrainerView(view._trainer, view.optimizers)
    vars(quiet).update(vars(view), logger=None, loggers=[])
    detach(copied, quiet, replayer)
    return copied


def has_own_backward(module: pl.LightningModule) -> bool:
    """Whether `module` overrides Lightning's `backward`, and so may multiply the loss."""
    return next(kind for kind in type(module).__mro__ if "backward" in vars(kind)).__name__ != "LightningModule"


def before_step(module: pl.LightningModule, trainer: pl.Trainer, optimizer: Optimizer) -> None:
    """Do what Lightning does between the backward pass and the optimizer's step."""
    scale = module.trainer.loss_scale  # type: ignore[attr-defined]  # of a `TrainerView`
    if scale != 1 and not optimizer.defaults.get("fused"):  # whose kernel takes the scale out
        inverse = torch.tensor(scale).double().reciprocal().float()  # a GradScaler computes the same
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
