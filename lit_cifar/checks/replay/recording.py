"""The record of one rank's work in a few optimizer steps, written while it trains, one file for each event.

Nothing is written into a tensor and no random number is drawn. Tensors that are divided over ranks are gathered;
nothing else is sent to another process.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_cifar.checks.repeated_step.attributes import Attributes, is_plain
from lit_cifar.checks.repeated_step.digests import Digest, Surroundings, digest
from lit_cifar.checks.repeated_step.events import Backward, Call, Digests, Event, Start, Step
from lit_cifar.checks.repeated_step.exchange import (
    Exchange,
    can_be_replayed,
    completed,
    intercepted,
    is_of_parts,
    sent_by,
)
from lit_cifar.checks.repeated_step.sharded import is_of_fsdp, is_sharded, whole
from lit_cifar.checks.repeated_step.tensors import device_of, fresh_copy, names_of
from lit_cifar.checks.replay.graph import Outputs, observed
from lit_cifar.checks.replay.hints import Hints
from lit_cifar.internals import tree_leaves, tree_map
from lit_cifar.mode.tensors import parameters_of


class Recorder:
    """Writes `<rank>-<number>-<kind>.pt` into `folder` for each event, and last `<rank>.pt`: reasons and hints."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        is_synced: Callable[[], bool],
        progress: Callable[[], dict[str, Any]],
        by_engine: bool = False,
        model_parallel_size: int = 1,
        copies: Collection[Tensor] = (),
    ) -> None:
        """Begin to record. Without `by_engine`, `backward_ended` must be called after each backward pass.

        `model_parallel_size` ranks hold a replica together; `copies` of tensors that others of them train are left out.
        """
        self.folder, self.rank, self.module, self.optimizers = folder, rank, module, list(optimizers)
        self.num_steps = 0
        self._is_synced, self._progress, self._by_engine = is_synced, progress, by_engine
        self._device = device_of(module)
        self._copies = copies
        self._names = {p: name for p, name in names_of(module, self.optimizers).items() if p not in copies}
        self._in_first_replica = rank < model_parallel_size
        self._sharded = is_sharded(module)  # gradients then appear only after they have been averaged
        self._reasons: list[str] = []
        self._numbers = count()
        self._open: list[tuple[int, Call]] = []  # calls whose outputs may still get a gradient
        self._depth = 0
        self._local: dict[str, list[Digest]] = {}
        self._surroundings: Surroundings | None = None  # surroundings of the first backward pass since the last event
        self._fresh: dict[str, bool] = {}  # whether a parameter had no gradient before, or zeros
        self._synced = False
        self._grads: Digests = {}
        self._step: tuple[int, Step] | None = None
        self._exchanges: list[Exchange] | None = None  # list for the next exchange; None between calls and backward
        self._of_backward: list[Exchange] = []
        self._beside = False  # see `Call.beside`
        self._replaced = ExitStack()
        self._replaced.enter_context(intercepted(self._exchange))
        self._known = {name: digest(parameter) for parameter, name in self._names.items()}
        self._handles: list[RemovableHandle] = []
        for number, optimizer in enumerate(self.optimizers):
            self._handles.append(optimizer.register_step_pre_hook(partial(self._before_step, number)))
            self._handles.append(optimizer.register_step_post_hook(partial(self._after_step, number)))
        self._hooked: set[str] = set()  # names of parameters that have a hook
        self._hints = Hints(module, self._device, self._is_changed)
        self._outputs = Outputs(self._names)
        self._replaced.enter_context(observed(self._before_backward, self._after_backward))
        if rank and self._in_first_replica:
            names, values = self._names, {name: parameter.detach() for parameter, name in self._names.items()}
            states = [{names[p]: state for p, state in one.state.items() if p in names} for one in self.optimizers]
            self._save(Start(values, states), f"start-{rank}")

    def _hook_parameters(self) -> None:
        """Add hooks to parameters that are trained from now on."""
        for parameter, name in self._names.items():
            if parameter.requires_grad and name not in self._hooked:
                self._hooked.add(name)
                hook = partial(self._on_gradient, name, parameter)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._replaced.close()
        self._flush()
        num_unknown = 0 if self._sharded or self._copies else len(self._outputs.unknown)
        hints = self._hints.close(self._names, [*map(parameters_of, self.optimizers)], num_unknown=num_unknown)
        with suppress(OSError, RuntimeError):  # rank 0 misses the file, and reports it
            torch.save((self._reasons, hints), self.folder / f"{self.rank}.pt")

    def recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its calls written down. It keeps its signature, by which a trainer passes arguments."""

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.begin(args, kwargs)
            self._depth += 1
            outputs = function(*args, **kwargs)
            self._depth -= 1
            self.end(outputs)
            return outputs

        return wrapper

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = {name: digest(parameter) for parameter, name in self._names.items()}
        call = Call(
            inputs=self._copied((args, kwargs)),
            surroundings=Surroundings.now(self._device),
            parameters=found,
            changed={
                name: whole(parameter).detach().clone()
                for parameter, name in self._names.items()
                if found[name].bits != self._known[name].bits
            },
            buffers={name: buffer.detach().clone() for name, buffer in self._buffers()},
            attributes=Attributes.of(self.module),
            progress=self._progress(),
        )
        self._hook_parameters()
        self._hints.begins(self.optimizers)
        self._known = found
        self._exchanges = call.exchanges
        self._open.append((next(self._numbers), call))

    def end(self, outputs: Any) -> None:
        _, call = self._open[-1]
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        call.outputs = [digest(leaf) for leaf in leaves]
        call.output_grads = [None] * len(leaves)
        self._outputs.add(leaves)
        for place, leaf in enumerate(leaves):
            if leaf.requires_grad and not any(leaf is other for other in leaves[:place]):
                began = partial(self._began, call.output_grads, place, leaf.grad_fn)
                leaf.register_hook(began)  # type: ignore[no-untyped-call]
        call.buffers_after = {name: digest(buffer) for name, buffer in self._buffers()}
        call.has_drawn = call.surroundings.has_drawn(self._device)
        call.ended = Surroundings.now(self._device).generators()
        self._hints.called(call)
        self._exchanges = None
        self._fresh = {}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, buffer) for name, buffer in self.module.named_buffers() if buffer not in self._copies)

    def unobserved(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose exchanges with other ranks are not written down."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            kept, self._exchanges = self._exchanges, None
            try:
                return function(*args, **kwargs)
            finally:
                self._exchanges = kept

        return wrapper

    def ended_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, at whose end a backward pass has ended."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = self.unobserved(function)(*args, **kwargs)
            self.backward_ended()
            return result

        return wrapper

    def _exchange(self, name: str, real: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        if self._exchanges is None or (self._sharded and is_of_fsdp()):
            if self._by_engine and self._exchanges is None:
                outputs = {output for _, call in self._open for output in call.outputs}
                self._beside |= is_of_parts(name, args[0], outputs)
                if can_be_replayed(name):
                    self._hints.sent_beside(sent_by(name, args))
            return real(group, *args, **kwargs)
        if not can_be_replayed(name):
            self._reasons.append(f"ranks exchange data inside a step by {name}, which is not replayed")
            return real(group, *args, **kwargs)
        work, exchange = completed(name, real, group, *args, **kwargs)
        self._exchanges.append(exchange)
        return work

    def _before_backward(self, roots: list[Tensor]) -> None:
        if not self._depth:  # a pass inside of a call is repeated with it
            self._reasons += self._outputs.begin(roots)
        if self._sharded:
            self._fresh = {name: parameter.grad is None for parameter, name in self._names.items()}
            self._synced = True
        now = Surroundings.now(self._device)
        self._surroundings = self._surroundings or now
        self._hints.begins_backward(now)

    def _after_backward(self) -> None:
        self._hints.ended_backward()
        if self._by_engine and (self._local or (self._sharded and self._outputs.begun)):
            self.backward_ended()

    def _began(self, grads: list[Tensor | None], place: int, node: Node | None, gradient: Tensor) -> None:
        """Note that a backward pass has come to an output."""
        if self._outputs.begun is None or node is None or node in self._outputs.begun:
            grads[place] = gradient.detach().clone()
        self._exchanges = self._of_backward

    def _on_gradient(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        self._synced = self._is_synced()
        if name not in self._fresh:
            self._fresh[name] = parameter.grad is None or not parameter.grad.any()
        self._local.setdefault(name, []).append(digest(gradient))

    @torch.no_grad()
    def backward_ended(self) -> None:
        """Write a backward pass down. Call this after every pass, when gradients have been reduced."""
        grads = {name: whole(p.grad) for p, name in self._names.items() if p.grad is not None}
        self._grads = {name: digest(gradient) for name, gradient in grads.items()}
        self._hints.reached(grads if self._sharded else self._local)
        is_kept = self._synced and self._in_first_replica
        values = {name: gradient.detach().clone() for name, gradient in grads.items()} if is_kept else {}
        fresh = [name for name, is_fresh in self._fresh.items() if is_fresh]
        exchanges = self._of_backward
        self._write(Backward(self._synced, self._surroundings, self._local, fresh, self._grads, values, exchanges))
        self._surroundings, self._local, self._fresh = None, {}, {}
        if not self._depth:
            self._exchanges, self._of_backward = None, []
            self._flush()

    def _before_step(self, number: int, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Note the gradients when the closure, if there is one, has run."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._used(number, optimizer)
            return None

        def observed(*inputs: Any, **more: Any) -> Any:
            result = closure(*inputs, **more)
            self._used(number, optimizer)
            return result

        return (args[0], observed, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    @torch.no_grad()
    def _used(self, number: int, optimizer: Optimizer) -> None:
        if self._step is not None:
            self._reasons.append(f"{type(optimizer).__name__} evaluates its closure several times in a step")
        groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        mine = [parameter for parameter in parameters_of(optimizer) if parameter in self._names]
        grads = {self._names[p]: whole(p.grad) for p in mine if p.grad is not None}
        found = {name: digest(gradient) for name, gradient in grads.items()}
        changed = [name for name, new in found.items() if name not in self._grads or new.bits != self._grads[name].bits]
        values = {name: grads[name].detach().clone() for name in changed} if self._in_first_replica else {}
        now = Surroundings.now(self._device)
        told = {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}
        scaling = {name: value.detach().clone() for name, value in told.items() if isinstance(value, Tensor)}
        self._step = next(self._numbers), Step(self._depth > 0, number, now, groups, found, values, {}, scaling)

    @torch.no_grad()
    def _after_step(self, number: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._step is None:  # the optimizer did not call its closure
            self._reasons.append(f"{type(optimizer).__name__} does not evaluate its closure")
            return
        place, step = self._step
        step.after = state_digests(optimizer, self._names)
        self._known = self._known | {name: value for name, value in step.after.items() if name in self._known}
        self._write(step, place)
        self._step = None
        self.num_steps += 1
        self._hints.stepped(optimizer)

    def _is_changed(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's gradients have changed since the last backward pass."""
        own = {self._names[p]: p.grad for p in parameters_of(optimizer) if p in self._names and p.grad is not None}
        known = {name: self._grads[name].bits for name in own if name in self._grads}
        return any(digest(whole(own[name])).bits != bits for name, bits in known.items())

    def _copied(self, values: Any) -> Any:
        def copied(leaf: Any) -> Any:
            try:
                return fresh_copy(leaf)
            except Exception as error:
                self._reasons.append(f"an input of type {type(leaf).__name__} cannot be copied: {error}")
                return None

        return tree_map(copied, values)

    def _flush(self) -> None:
        for place, call in self._open:
            call.beside = self._beside
            self._write(call, place)
        self._open = []

    def _write(self, event: Event, place: int | None = None) -> None:
        place = next(self._numbers) if place is None else place
        self._save(event, f"{self.rank}-{place:06d}-{type(event).__name__}")

    def _save(self, value: Event | Start, name: str) -> None:
        try:
            torch.save(value, self.folder / f"{name}.pt")
        except Exception as error:  # pickle raises errors of many kinds
            self._reasons.append(f"a {type(value).__name__.lower()} cannot be written down: {error}")


def state_digests(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Digests:
    """Digests of an optimizer's parameters, by name, and of its state, by "<name>: <key>"."""
    found = {names[parameter]: digest(parameter) for parameter in parameters_of(optimizer) if parameter in names}
    for parameter, state in optimizer.state.items():
        if parameter in names:
            found |= {f"{names[parameter]}: {key}": _state_digest(value) for key, value in state.items()}
    return found


def _state_digest(value: Any) -> Digest:
    """Digest of the tensors and plain values that it holds: the `repr` of an object may contain its address."""
    if isinstance(value, Tensor) or is_plain(value):
        return digest(value)
    return digest([digest(leaf).bits for leaf in tree_leaves(value) if isinstance(leaf, Tensor) or is_plain(leaf)])
