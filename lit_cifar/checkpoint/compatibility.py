"""Whether a checkpoint belongs to the same network, classes and optimizer as a run that starts from it.

What a file says is part of a command to paste only if it is a number or one of our own names.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar.checkpoint.content import check_content, described
from lit_cifar.checkpoint.format import OPTIMIZER, SCHEDULE, Header, TrainedOn, class_path
from lit_cifar.data.dataset import DATASETS
from lit_cifar.errors import CheckpointError, one_line
from lit_cifar.internals import tree_leaves, tree_map_only

_OF_BEST = {  # what a ModelCheckpoint holds once it has saved
    "dirpath": str | None,
    "best_k_models": dict[str, float],
    **dict.fromkeys(("best_model_score", "current_score", "kth_value"), float | None),
}
_SQUARES = {"step", "exp_avg_sq", "max_exp_avg_sq", "square_avg"}  # what no step of an optimizer makes negative
_CONFIG = "which RUN_FOLDER/config.yaml has"
_PACKAGES = ("", "torch.optim.lr_scheduler", "lit_cifar")  # of optimizers and schedules; "" is torch.optim
_SIZES = {"arch": "--model.arch", "stem": "--model.stem", "image_size": "--data.image_size"}


def check_header(checkpoint: dict[str, Any], own: Header) -> None:
    """Raise a `CheckpointError` if `checkpoint` is of a different network."""
    found = Header.read(checkpoint)
    if found != own:
        sizes = {name: getattr(found, name) for name in _SIZES}
        flags = [f"{_SIZES[name]}={size}" for name, size in sizes.items() if size not in (None, getattr(own, name))]
        problem = f"the checkpoint holds {found}, the model is {own}"
        raise CheckpointError(problem, remedy=f"pass {' '.join(flags) or 'the flags of its training'}, {_CONFIG}")


def check_shapes(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise a `CheckpointError` unless `weights` have the names, shapes and kinds of this network's."""
    own = {name: described(tensor) for name, tensor in network.state_dict().items()}
    found = {name: described(tensor) for name, tensor in weights.items()}
    for name in (*own, *found):
        if own.get(name) != found.get(name):
            here, there = (shapes.get(name, "missing") for shapes in (own, found))
            both = f"{name} is {there} in the checkpoint, {here} in the model"
            problem = f"the weights do not fit this {type(network).__name__}: {both}"
            remedy = f"pass the flags of their training, {_CONFIG}, or of their network, e.g. --model.arch=resnet18"
            raise CheckpointError(problem, remedy=remedy)


def wrong_values(network: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """In words, the first of the weights with nan, an infinite parameter or a negative variance."""
    parameters = {name for name, its in network.named_parameters() if its.requires_grad}
    for name, tensor in weights.items():
        if name.endswith("running_var") and (tensor < 0).any():
            return f"the weights are negative variances: {name}"
        if (~tensor.isfinite() if name in parameters else tensor.isnan()).any():
            return f"the weights are not finite: {name}"
    return ""


def check_classes(checkpoint: Mapping[str, Any], own: TrainedOn, *, normalised: bool) -> None:
    """Raise a `CheckpointError` unless a run's `own` data have the same classes in the same order.

    If only the data sets differ, that is an error where images must be `normalised` alike, and otherwise a warning.
    """
    found = TrainedOn.read(checkpoint)
    if found is None:
        rank_zero_warn("the checkpoint does not say which classes it was trained on: they are not compared")
        return
    flag = f"--data.dataset={found.dataset}" if found.dataset in DATASETS else "the --data.dataset"
    if found.classes != own.classes:
        pairs = enumerate(zip_longest(found.classes, own.classes, fillvalue="nothing"))
        label, (there, here) = next((label, pair) for label, pair in pairs if pair[0] != pair[1])
        classes = f"it was trained on {described(found.classes)}, and these are {described(own.classes)}"
        problem = f"class {label} is {there} in the checkpoint and {here} in these data; {classes}"
        raise CheckpointError(problem, remedy=f"pass {flag} and the --data.root of its training, {_CONFIG}")
    if found.dataset != own.dataset:
        problem = f"the checkpoint was trained on {found.dataset}, which is normalised otherwise than {own.dataset}"
        if normalised:
            raise CheckpointError(problem, remedy=f"pass {flag}, {_CONFIG}")
        rank_zero_warn(f"{problem}: that may cost accuracy")


def check_optimizer(checkpoint: Mapping[str, Any], optimizer: Optimizer, scheduler: Any) -> None:
    """Raise a `CheckpointError` if a training had an optimizer or a schedule of another class."""
    for key, own in {OPTIMIZER: class_path(optimizer), SCHEDULE: class_path(scheduler)}.items():
        if (found := checkpoint.get(key)) not in (None, own):
            package, _, kind = found.rpartition(".")
            name = f"={found}" if package in _PACKAGES and kind.isidentifier() else ""
            problem = f"the checkpoint continues a training with {found}; this one has {own}"
            raise CheckpointError(problem, remedy=f"pass --model.{key}{name} as in its training, {_CONFIG}")


def check_states(checkpoint: Mapping[str, Any], trainer: Trainer, optimizer: Optimizer, scheduler: Any) -> None:
    """Raise a `CheckpointError` unless the states of a training can become those of this run's parts.

    Torch and Lightning take most of what cannot, and go on. `optimizer` and `scheduler` are of no use afterwards.
    """
    loops, plugin = checkpoint["loops"]["fit_loop"], trainer.precision_plugin
    check_content(loops, trainer.fit_loop.state_dict(), "loops.fit_loop", partly=True)
    progress = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    if progress != (steps := checkpoint["global_step"]):
        raise CheckpointError(f"its loops and its global_step say {progress} and {steps} optimizer steps")
    for name in ("optimizer_states", "lr_schedulers"):
        if len(checkpoint[name]) > 1:
            raise CheckpointError(f"its {name} are {len(checkpoint[name])}, of which a training here has one")
    if (name := type(plugin).__qualname__) in checkpoint:
        check_content(checkpoint[name], plugin.state_dict(), name)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning's own omission
        if callback.state_key in checkpoint["callbacks"]:
            _check_callback(checkpoint["callbacks"][callback.state_key], callback)
    check_content(checkpoint["lr_schedulers"], [scheduler.state_dict()], "lr_schedulers", partly=True)
    if _holds_nan(checkpoint["lr_schedulers"]):
        raise CheckpointError("the state of its schedule holds nan")
    taken = checkpoint["lr_schedulers"][0].get("last_epoch", 0)
    if taken > 10_000 * (steps + 1):  # it counts in the batches of this run, which may have become smaller
        raise CheckpointError(f"its schedule has taken {described(taken)} steps, and its optimizer {steps}")
    with _trying("the schedule"):
        scheduler.load_state_dict(deepcopy(checkpoint["lr_schedulers"][0]))
    _check_state(checkpoint["optimizer_states"][0], optimizer, begun=checkpoint["global_step"] > 0)
    rates = [group.get("lr", 0.0) for group in checkpoint["optimizer_states"][0]["param_groups"]]
    rates += checkpoint["lr_schedulers"][0].get("base_lrs", [])
    if not all(map(math.isfinite, rates)):
        raise CheckpointError(f"its learning rates are {described(rates)}")


def _check_callback(state: Any, callback: Callback) -> None:
    example: dict[str, Any] = {}
    with suppress(Exception):  # what is not set up yet may have no state
        known = (its for its in type(callback).__mro__ if its.__module__.split(".")[0] in ("lightning", "lit_cifar"))
        kind: Any = next(known)
        example = kind.state_dict(callback) | (_OF_BEST if isinstance(callback, ModelCheckpoint) else {})
    name = type(callback).__name__
    check_content(state, example, f"callbacks.{name}", partly=True)
    if isinstance(callback, ModelCheckpoint):  # which removes the files in time
        within = Path(state.get("dirpath") or ".").resolve()
        if not all(Path(path).resolve().is_relative_to(within) for path in state.get("best_k_models", ())):
            raise CheckpointError(f"the files of {name} in it are outside of their folder")
    if isinstance(callback, ModelCheckpoint | EarlyStopping):
        with _trying(name):
            copy(callback).load_state_dict(deepcopy(state))


def _check_state(found: dict[str, Any], optimizer: Optimizer, *, begun: bool) -> None:
    groups, settings = optimizer.state_dict()["param_groups"], [dict(group) for group in optimizer.param_groups]
    check_content(found["param_groups"], groups, "optimizer_states.0.param_groups", partly=True)
    then, now = ([[*group.get("params", ())] for group in each] for each in (found["param_groups"], groups))
    if then != now:
        before, here = ([*map(len, numbers)] for numbers in (then, now))
        problem = f"its optimizer had groups of {before} parameters; this one has {here}, or numbers them otherwise"
        raise CheckpointError(problem, remedy=f"pass --model.fine_tuning.head_lr of its training, {_CONFIG}")
    found = found | {"state": {number: its for number, its in found["state"].items() if not isinstance(number, str)}}
    check_content(found["state"], dict[int, dict[str, Any]], "optimizer_states.0.state")
    with _trying("the optimizer"):
        optimizer.load_state_dict(found)
    wanted = {number: state for number, state in _after_a_step(optimizer).items() if state}
    for number in wanted.keys() & found["state"].keys():
        check_content(found["state"][number], wanted[number], f"optimizer_states.0.state.{number}")
    lacking = [number for number in wanted if number not in found["state"]]
    if lacking and begun:
        problem = f"it holds no state of the optimizer for {len(lacking)} of {len(wanted)} parameters"
        if len(lacking) == len(wanted):
            raise CheckpointError(problem)
        rank_zero_warn(f"{problem}: none of them has had a gradient, or the file is not whole")
    if _holds_nan(found):
        raise CheckpointError("the state of its optimizer holds nan: it has diverged")
    numbers = [(name, state[name]) for state in found["state"].values() for name in _SQUARES & state.keys()]
    if negative := [name for name, value in numbers if (torch.as_tensor(value) < 0).any()]:
        raise CheckpointError(f"the {negative[0]} of its optimizer is negative")
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for number, state in _after_a_step(optimizer).items():
        if number in wanted and (more := sorted(state.keys() - wanted[number].keys())):
            problem = f"the optimizer needs {', '.join(more)} of each parameter here, which its training did not keep"
            raise CheckpointError(problem, remedy=f"pass the --model.optimizer of its training, {_CONFIG}")


def _holds_nan(held: Any) -> bool:
    numbers = (torch.as_tensor(each) for each in tree_leaves(held) if isinstance(each, float | Tensor))
    return any(bool(each.isnan().any()) for each in numbers if each.is_floating_point())


def _after_a_step(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The state by parameter that a step makes, on the meta device, which computes nothing; none if it cannot."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        own, group["params"] = group["params"], [torch.empty_like(each, device="meta") for each in group["params"]]
        for parameter, meta in zip(own, group["params"], strict=True):
            meta.grad = torch.empty_like(meta) if parameter.requires_grad else None
    with suppress(Exception):
        optimizer.step()
        made = optimizer.state_dict()["state"]
        made = {number: state for number, state in made.items() if not isinstance(number, str)}
        states: dict[int, dict[str, Any]] = tree_map_only(Tensor, lambda it: torch.empty_like(it, device="cpu"), made)
        return states
    return {}


@contextmanager
def _trying(part: str) -> Iterator[None]:
    """Say in a line that a part of this run cannot take its state."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(f"the state of {part} in it cannot be loaded: {reason}") from error
