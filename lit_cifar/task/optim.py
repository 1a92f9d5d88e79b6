"""The default optimizer, and a learning rate schedule that torch lacks; all others are torch.optim's own."""

import math
import warnings
from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.optim.optimizer import ParamsT

from lit_cifar.errors import ConfigError, printable

_OF_RATE = ("base_lrs", "_last_lr")  # learning rates in the state of a schedule
# Entries of a parameter group that choose the kernels of a step, and do not change its result.
_HOW = ("foreach", "fused", "capturable", "differentiable")
_PLATEAU = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # the progress of ReduceLROnPlateau


class NesterovSGD(SGD):
    """SGD with Nesterov momentum 0.9, as for Wide ResNets (Zagoruyko and Komodakis, 2016).

    The command line passes the default optimizer's settings on to another that takes them; null goes to none.

    Args:
        params: Passed on to SGD.
        lr: Passed on to SGD.
        weight_decay: Passed on to SGD; null is 2e-3.
        fused: Passed on to SGD: all parameters in one kernel.
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.2, *, weight_decay: float | None = None, fused: bool | None = None
    ) -> None:
        decay = 2e-3 if weight_decay is None else weight_decay
        super().__init__(params, lr=lr, momentum=0.9, weight_decay=decay, nesterov=True, fused=fused)


class WarmupDecay(LRScheduler):
    """Raises the learning rate linearly to the optimizer's, then decays it towards zero, which a next step would have.

    It steps once per batch. `LitResNet` calls `set_total_steps` with the number of optimizer steps of the run.
    Linear warm-up: Goyal et al., "Accurate, large minibatch SGD", 2017. Cosine: Loshchilov and Hutter, "SGDR", 2017.

    Args:
        optimizer: Its learning rates are the peak.
        warmup: Share of all steps in which the rate rises, in [0, 1).
        decay: Shape of the decay.
    """

    def __init__(
        self, optimizer: Optimizer, *, warmup: float = 0.2, decay: Literal["cosine", "linear"] = "linear"
    ) -> None:
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup={warmup} is not a share of all steps: it must be at least 0 and below 1")
        self.warmup = warmup
        self.decay = decay
        self.total_steps: int | None = None
        super().__init__(optimizer)

    def set_total_steps(self, total_steps: int) -> None:
        """Set the number of optimizer steps of the schedule, and the learning rate of the first."""
        self.total_steps = total_steps
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each parameter group for the step about to be taken."""
        return [lr * self.factor(self.last_epoch) for lr in self.base_lrs]

    def factor(self, step: int) -> float:
        """The factor of the peak rate at `step`, from 0 to `total_steps - 1`; 1.0 before `set_total_steps`."""
        if self.total_steps is None:
            return 1.0
        rise = round(self.warmup * self.total_steps)
        if step < rise:
            return (step + 1) / (rise + 1)
        fallen = min((step - rise) / max(self.total_steps - rise, 1), 1.0)
        return (1 + math.cos(math.pi * fallen)) / 2 if self.decay == "cosine" else 1 - fallen


def check_total_steps(scheduler: Any, total_steps: float) -> None:
    """Refuse a schedule that is planned over a whole run if that has more steps, or no end (infinity)."""
    ends = total_steps != math.inf
    if isinstance(scheduler, WarmupDecay) and not ends:
        problem = "WarmupDecay plans over the whole run, and this one has no end"
        raise ConfigError(problem, remedy="set --trainer.max_epochs, --trainer.max_steps or --model.lr_scheduler")
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < total_steps:
        planned = scheduler.total_steps
        problem = f"OneCycleLR is planned for {planned} steps, and this run has {total_steps if ends else 'no end'}"
        flag = f"--model.lr_scheduler.total_steps={total_steps}" if ends else f"--trainer.max_steps={planned}"
        raise ConfigError(problem, remedy=f"pass {flag}")


def followed_metric(scheduler: ReduceLROnPlateau) -> str:
    """The metric that it follows: Lightning's own class names it, torch's does not."""
    return str(getattr(scheduler, "monitor", "val/loss"))


def keep_saved_types(optimizer: Optimizer) -> None:
    """Have `load_state_dict` give scalars of the state back the type that they were saved with.

    Settings of how a step is computed, such as fused kernels, stay those of `optimizer`. torch gives all state but
    `step` the type of the parameter. But NAdam's `mu_product`, for example, is float32 for any, and would be rounded.
    """
    saved: list[dict[str, Any]] = []

    def keep_how(loading: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        saved.append(state_dict)
        pairs = zip(state_dict["param_groups"], loading.param_groups, strict=False)
        groups = [group | {name: own[name] for name in _HOW if name in own} for group, own in pairs]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(keep_how)

    def restore(loaded: Optimizer) -> None:
        state_dict = saved.pop()
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in loaded.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and not value.ndim:
                    loaded.state[parameter][name] = value.to(loaded.state[parameter][name].device, copy=True)

    optimizer.register_load_state_dict_post_hook(restore)


class Recipe:
    """The settings of a loss, an optimizer and its schedule before the first step; no reference to these is kept.

    What a schedule replaces, as OneCycleLR the optimizer's rate, is none. A checkpoint brings the settings of the
    training before in the states of both. A resumed run has its own, as typed and in its `config.yaml`.
    """

    def __init__(self, optimizer: Optimizer, scheduler: Any, *, label_smoothing: float = 0.0) -> None:
        self._label_smoothing, self._schedule = label_smoothing, deepcopy(scheduler.state_dict())
        groups = optimizer.param_groups
        self._groups = [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {"label_smoothing": self._label_smoothing}
        found |= {f"lr_scheduler.{name}": value for name, value in self._schedule.items() if name not in _OF_RATE}
        for number, group in enumerate(self._groups):
            label = f"optimizer[{number}]" if number else "optimizer"
            found |= {f"{label}.{name}": value for name, value in group.items() if name not in (*_HOW, "initial_lr")}
            found[f"{label}.lr"] = group.get("initial_lr", group["lr"])  # the other is that of the first step
        return {name: _plain(it) for name, it in found.items()}

    def resume(
        self, optimizer: Optimizer, scheduler: Any, *, before: Mapping[str, Any] | None, step: int, taken: int | None
    ) -> None:
        """Let these settings hold after a checkpoint's states were loaded, and say which the training had `before`.

        The schedule stands where it would be if it had been this one from the first step on: behind `taken` steps,
        where earlier epochs may have had another number of them. If nothing has changed, nothing is touched.
        """
        own, known = self.settings(), before or {}
        changed = [] if before is None else [name for name in own if known.get(name) != own[name]]
        loaded = scheduler.state_dict()
        behind = (loaded if "last_epoch" in loaded else loaded["_schedulers"][0])["last_epoch"]
        is_elsewhere = taken not in (None, behind)
        if before is not None and not changed and not is_elsewhere:
            return
        if is_elsewhere:
            rank_zero_warn(f"the schedule goes on behind {taken} steps of this run, not {behind}")
        if changed:
            both = [", ".join(f"{one}={str(of.get(one))[:80]}" for one in changed) for of in (known, own)]
            then, now = map(printable, both)
            rank_zero_warn(f"the training before had {then}; from optimizer step {step} on it has {now}")
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, fresh in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(fresh)
        if isinstance(scheduler, ReduceLROnPlateau):  # it follows a metric
            for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
                label = f"optimizer[{number}].lr" if number else "optimizer.lr"
                then = (before or own).get(label) or own[label]
                group["lr"] = rate * own[label] / then if then else rate
            is_anew = {"lr_scheduler.monitor", "lr_scheduler.mode"} & {*changed}  # the best was another metric's
            kept = ("last_epoch",) if is_anew else _PLATEAU
            scheduler.load_state_dict(self._schedule | {name: loaded[name] for name in kept})
            return
        scheduler.load_state_dict(deepcopy(self._schedule))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer takes no steps here
            for _ in range(behind if taken is None else taken):
                scheduler.step()


def _plain(value: Any) -> Any:
    kept = isinstance(value, bool | float | int | str | list | tuple | dict | None) or getattr(value, "ndim", 1) == 0
    return value if kept else printable(str(value))  # a checkpoint takes no others
