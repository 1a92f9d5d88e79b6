"""What a process sees of the training in it: its modules, optimizers, schedules, steps, and what the script tells."""

import gc
import inspect
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer, swa_utils
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils import checkpoint

from lit_cifar.checks.relations.generators import seed_all, states, still
from lit_cifar.checks.relations.patching import patched
from lit_cifar.checks.relations.plan import Plan, Trace
from lit_cifar.checks.relations.snapshot import snapshot
from lit_cifar.checks.relations.trained import observed, owned_by, statistics, told
from lit_cifar.checks.repeated_step.batches import row_digests, tensors_in
from lit_cifar.internals import tree_map

CHECKPOINT = "checkpoint"  # in the folder of the run, for all ranks; a script may add to the name
DRAWS_IN_OPTIMIZER = "the optimizer draws random numbers, one parameter after another"
DRAWS_IN_EVALUATION = "the evaluation draws random numbers, such as noise, or by dropout that is left on"
_MOST_VALUES = 2**22  # of a step's samples that are told apart


class Ended(BaseException):
    """The training ends here, as if it were killed; no `except Exception` of the script catches it."""


class Watched:
    """The training of this process, and the answers to its calls (`calls.Session`)."""

    def __init__(self, plan: Plan, folder: Path, rank: int) -> None:
        self.plan, self.folder, self.rank, self.trace = plan, folder, rank, Trace()
        self.roots: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedules: list[LRScheduler] = []
        self.kept: dict[str, Any] = {}
        self.phase: Callable[[], str] = self._own_phase
        self.evaluation_batch = plan.evaluation_batch
        self._made: list[weakref.ref[nn.Parameter]] = []  # in the order of their making
        self._depth = 0
        self._has_trained = self._is_over = self._is_saved = self._is_in_batch = False
        self._spoilt: set[int] = set()
        self._batch_of_step = 0
        self._random: tuple[Any, ...] | None = None  # the states of generators before a step draws
        self._rows: list[int] | None = None  # digests of the samples of the batch that is trained
        self._draws = 0  # for its samples
        self._others: list[nn.Module] = []  # that are called where no gradient is made, such as averages
        self._called_now: nn.Module | None = None
        self._of_optimizer: tuple[Any, ...] | None = None  # the states of generators before its step
        self._frozen: dict[int, tuple[int, ...]] = {}
        self._goes_back = False  # gradients have been made since the last step

    def _own_phase(self) -> str:
        """Of a plain loop: it evaluates without gradients, or with a model in eval mode that is else trained."""
        modules = (*self.roots, *([] if self._called_now is None else [self._called_now]))
        evaluates = self._has_trained and not any(module.training for module in modules)
        return "train" if torch.is_grad_enabled() and not evaluates else "evaluate"

    # What the script asks
    def knob(self, name: str, own: Any) -> Any:
        self.trace.asked[name] = own
        return dict(self.plan.knobs).get(name, own)

    def resume(self) -> str | None:
        self.trace.asked["resume"] = None
        return self.plan.resume

    def save(self) -> str | None:
        self.trace.asked["save"] = None
        self.trace.saves.append(self.trace.steps)
        if self._is_saved:
            raise Ended
        if len(self.trace.saves) != self.plan.save_at:
            return None
        self.has_saved()
        return str(self.folder.parent / CHECKPOINT)

    def has_saved(self) -> None:
        """Note the state of the training as it should be in the checkpoint."""
        self._is_saved = True
        self.trace.saved = self.snapshot()

    def asked_to_share(self) -> None:
        self.trace.asked["share"] = None

    def report(self, values: dict[str, Any]) -> None:
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        if numbers:
            self.trace.logged.append((self.trace.steps, numbers))
        self.kept |= values

    # What torch does
    def patch(self) -> None:
        """Follow every module, optimizer and schedule of this process."""
        patched(nn.Module, "__call__", self._called)
        patched(nn.Module, "register_parameter", self._registered)
        patched(nn.Module, "load_state_dict", self._state_loaded)
        patched(torch, "load", self._file_loaded)
        patched(Optimizer, "__init__", self._optimizer_made)
        patched(LRScheduler, "__init__", self._noting(self.schedules.append))
        patched(AveragedModel, "__init__", self._noting(self._keep_average))
        patched(checkpoint, "checkpoint", self._checkpointed)
        patched(torch.Tensor, "backward", self._backward)
        patched(swa_utils, "update_bn", self._as_it_is)
        patched(torch, "compile", self._compiler)
        patched(nn.Module, "compile", self._compiler)
        patched(GradScaler, "__init__", self._scaler_made)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _noting(self, note: Callable[[Any], None]) -> Callable[[Any], Callable[..., None]]:
        """For a constructor: `note` each object that it has made."""

        def made(make: Any) -> Callable[..., None]:
            def noted(own: Any, *args: Any, **settings: Any) -> None:
                make(own, *args, **settings)
                note(own)

            return noted

        return made

    def _keep_average(self, average: nn.Module) -> None:
        self._keep("average", average)

    def _keep(self, what: str, value: Any) -> None:
        """Keep one more of its kind."""
        self.kept[f"{what} {sum(name.startswith(f'{what} ') for name in self.kept)}"] = value

    def _optimizer_made(self, make: Any) -> Callable[..., None]:
        def made(optimizer: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
            make(optimizer, _in_other_groups(list(params)) if self.plan.regroup else params, defaults)
            self.optimizers.append(optimizer)

        return made

    def _as_it_is(self, evaluate: Any) -> Callable[..., Any]:
        """For what reads data without a gradient and is no evaluation: its batches stay as they are."""

        def evaluated(*args: Any, **settings: Any) -> Any:
            size, self.evaluation_batch = self.evaluation_batch, None
            try:
                return evaluate(*args, **settings)
            finally:
                self.evaluation_batch = size

        return evaluated

    def _scaler_made(self, make: Any) -> Callable[..., None]:
        def made(scaler: GradScaler, device: str = "cuda", init_scale: float = 2.0**16, *args: Any, **own: Any) -> None:
            make(scaler, "cpu", init_scale * self.plan.scale, *args, **own)
            self.trace.scales |= scaler.is_enabled()
            self._keep("scaler", scaler)

        return made

    def _backward(self, backward: Any) -> Callable[..., None]:
        def gone_back(loss: torch.Tensor, *args: Any, **settings: Any) -> None:
            if self.trace.steps and not self._goes_back and len(self.optimizers) == 1:
                gradients = [p.grad for p in owned_by(self.optimizers) if p.grad is not None]
                self.trace.stale += any(bool(gradient.any()) for gradient in gradients)
            self._goes_back = True
            backward(loss, *args, **settings)

        return gone_back

    def _compiler(self, compiled: Any) -> Callable[..., Any]:
        def made(function: Any = None, *args: Any, **settings: Any) -> Any:
            self.trace.compiles = True
            if self.plan.compiled:
                return compiled(function, *args, **settings)
            return function if function is not None else lambda own: own

        return made

    def _checkpointed(self, recompute: Any) -> Callable[..., Any]:
        own = inspect.signature(recompute).parameters

        def checkpointed(function: Any, *args: Any, **settings: Any) -> Any:
            self.trace.recomputes = True
            if not self.plan.keep_activations:
                return recompute(function, *args, **settings)
            return function(*args, **{name: value for name, value in settings.items() if name not in own})

        return checkpointed

    def _before_step(self, *_: Any) -> None:
        self._of_optimizer = states()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.trace.first and all(group.get("lr") == 0 for group in optimizer.param_groups):
            return  # torch makes the states of an optimizer so, before it loads a checkpoint into them
        self._note_draws()
        if self._of_optimizer != states():
            self.trace.remarks.add(DRAWS_IN_OPTIMIZER)
        self.trace.steps += 1
        self._goes_back = False
        self._random, self._batch_of_step = states() if self._is_in_batch else None, 0
        parameters = [p.detach() for p in owned_by([optimizer]) if not p.is_meta]
        owned = [parameter.double().norm() for parameter in parameters]
        self.trace.norms.append(float(torch.stack([norm.cpu() for norm in owned]).norm()) if owned else 0.0)
        if self.plan.generators:
            self.seed("step")
        if self.trace.steps >= self.plan.most_steps:
            self._is_over = True

    def begins_batch(self, samples: list[int], *, is_divided: bool) -> None:
        """Called after a batch of training was fetched, with digests of its samples, if they can be told apart."""
        if not self.trace.is_lightning:
            self.note_samples(samples)
        self._batch_of_step += 1
        self._rows, self._draws, self._is_in_batch = samples if is_divided else None, 0, True
        self._random = states()  # whatever the data set has drawn
        if self.plan.generators:
            self.seed(f"batch {self._batch_of_step}")

    def fetches_batch(self) -> None:
        """Called before a batch of training is fetched, but for the first of a loader."""
        self._note_draws()
        self._random, self._rows, self._is_in_batch = None, None, False
        if self.plan.generators:
            self.seed(f"fetch {self._batch_of_step}")

    def seed(self, what: str) -> None:
        """Seed all generators by the number of steps before, also of those of a run that this one goes on from."""
        seed_all(what, self.trace.steps + self.plan.steps_before)

    def _called(self, call: Any) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **settings: Any) -> Any:
            is_outermost = self._depth == 0
            if is_outermost and next(module.parameters(), None) is not None:
                self._before_call(module, (args, settings))
                args, settings = self._in_double(args), self._in_double(settings)
            before = states() if is_outermost and self.phase() == "evaluate" else None
            self._depth += 1
            try:
                return call(module, *args, **settings)
            finally:
                self._depth -= 1
                if is_outermost and self.phase() == "train":
                    self._note_draws()
                elif is_outermost and before != states():
                    self.trace.remarks.add(DRAWS_IN_EVALUATION)

        return called

    def _registered(self, register: Any) -> Callable[..., None]:
        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            register(module, name, parameter)
            if parameter is not None:
                self._made.append(weakref.ref(parameter))

        return registered

    def _state_loaded(self, load: Any) -> Callable[..., Any]:
        def loaded(module: nn.Module, *args: Any, **settings: Any) -> Any:
            self._spoil({id(parameter) for parameter in module.parameters()})
            return load(module, *args, **settings)

        return loaded

    def _file_loaded(self, load: Any) -> Callable[..., Any]:
        def loaded(file: Any, *args: Any, **settings: Any) -> Any:
            if str(file).startswith(self.plan.resume or "\0"):
                self._spoil({id(own()) for own in self._made})
            return load(file, *args, **settings)

        return loaded

    def _in_double(self, tree: Any) -> Any:
        """Inputs of the type of the weights, where a script asks for float32 by name."""

        def cast(leaf: Any) -> Any:
            is_single = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
            return leaf.double() if is_single else leaf

        return tree_map(cast, tree) if self.plan.double else tree

    def _before_call(self, module: nn.Module, inputs: Any) -> None:
        self._called_now = module
        if self.plan.quiet and not any(module is root for root in self.roots):
            still(module)
        if self.phase() != "train":
            self._random = None
            self._keep_evaluated(module)
            return
        self._has_trained |= module.training
        if not any(module is root for root in self.roots):
            self._forget()
            self.roots.append(module)
        self.continues()
        self.begins()
        if self._random is None:
            self._random = states()
        if not self._is_in_batch and not self.trace.is_lightning:
            tensors = tensors_in(inputs)
            self.note_samples([] if any(tensor.requires_grad for tensor in tensors) else told_apart(tensors))

    def _forget(self) -> None:
        """Keep what the script still holds: one that begins again in the same process has given up its first model."""
        all_held: list[list[Any]] = [self.roots, self.optimizers, self.schedules, self._others]
        seen = [[weakref.ref(one) for one in held] for held in all_held]
        for held in all_held:
            held.clear()
        gc.collect()
        for held, before in zip(all_held, seen, strict=True):
            held += [one for own in before if (one := own()) is not None]

    def _keep_evaluated(self, module: nn.Module) -> None:
        """Keep a module that is called without gradients and shares no parameter with a trained one."""
        trained = {id(parameter) for root in self.roots for parameter in root.parameters()}
        if trained.isdisjoint(map(id, module.parameters())) and not any(module is other for other in self._others):
            self._others.append(module)

    def continues(self) -> None:
        """Called before each batch and call of training: end the training if it is time."""
        if self._is_over or self._is_saved:
            raise Ended

    def begins(self) -> None:
        """Note what the training begins with, the first time."""
        if not self.trace.first:
            self.trace.first = [told(own()) for own in self._made]
            self._frozen = statistics(self.roots)
        if self.plan.resume and not self.trace.resumed:
            self.trace.resumed = self.snapshot()

    def note_samples(self, samples: list[int]) -> None:
        """Note the digests of samples of the step that follows."""
        while len(self.trace.samples) <= self.trace.steps:
            self.trace.samples.append([])
        self.trace.samples[self.trace.steps] += samples

    def _note_draws(self) -> None:
        if self._random is not None and self._random != states():
            self.trace.draws |= self.plan.quiet
            if (before := zlib.crc32(self._random[0])) not in self.trace.drawn:
                self.trace.drawn.append(before)

    def key_of_draw(self) -> tuple[int, list[int]] | None:
        """What a random number for each sample of this batch follows from: the step, the draw, and the sample."""
        if self._rows is None:
            return None
        self._draws += 1
        return hash((self.trace.steps, self._draws)), self._rows

    def draws(self) -> None:
        """Note that a step draws numbers from a generator of the script's own."""
        self.trace.draws |= self._is_in_batch

    def draws_apart(self) -> None:
        """Note that an evaluation does so: other batches give its samples other numbers."""
        if self._has_trained and self.phase() == "evaluate":
            self.trace.remarks.add(DRAWS_IN_EVALUATION)

    def _spoil(self, ids: set[int]) -> None:
        """Change parameters that are drawn: the same seed would otherwise hide that a checkpoint does not hold them."""
        for place in (*self.plan.redrawn,) if self.plan.resume else ():
            parameter = self._made[place]() if place < len(self._made) else None
            if parameter is not None and place not in self._spoilt and id(parameter) in ids:
                self._spoilt.add(place)
                with torch.no_grad():
                    parameter.mul_(1.5).add_(0.01)

    def finish(self) -> None:
        """Note what the training has come to."""
        made = [own() for own in self._made]
        self.trace.state = self.trace.state or self.snapshot()
        self.trace.owned = len(owned_by(self.optimizers))
        self.trace.moved = sum(told(one) != was for one, was in zip(made, self.trace.first, strict=False))
        self.trace.observed = [*observed(made, self.trace.first, self._frozen, self.roots, self.optimizers)]

    def snapshot(self) -> dict[str, Any]:
        depth, self._depth = self._depth, 1  # modules that are called for it belong to nobody
        try:
            made = {id(one): place for place, own in enumerate(self._made) if (one := own()) is not None}
            roots = sorted(self.roots, key=lambda root: min(made.get(id(p), len(made)) for p in root.parameters()))
            others = {f"evaluated {number}": other for number, other in enumerate(self._others)}
            return snapshot(roots, self.optimizers, self.schedules, self.kept | others)
        finally:
            self._depth = depth


def told_apart(batch: Any) -> list[int]:
    """Digests of the samples along dimension 0; none of a large batch, which would take too long."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    if sum(tensor.numel() for tensor in tensors) > _MOST_VALUES:
        return []
    rows = [row_digests(tensor) for tensor in tensors if len(tensor) == len(tensors[0])]
    return rows[0] if len(rows) == 1 else [hash(values) for values in zip(*rows, strict=True)]


def _in_other_groups(params: list[Any]) -> list[Any]:
    """Groups in reverse order; two groups in place of one."""
    if params and isinstance(params[0], dict):
        return params[::-1]
    half = len(params) // 2
    return [{"params": params[half:]}, {"params": params[:half]}] if half else params
