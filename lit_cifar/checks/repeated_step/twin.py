"""A copy of a module and its optimizers that one process can train by itself."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar import internals
from lit_cifar.checks.repeated_step.attributes import Attributes, Key
from lit_cifar.checks.repeated_step.digests import Surroundings
from lit_cifar.checks.repeated_step.events import Start, UnjudgeableError
from lit_cifar.checks.repeated_step.exchange import Handler, intercepted, process_groups
from lit_cifar.checks.repeated_step.sharded import Module, is_sharded, what_is_not_replayed, whole, whole_copy
from lit_cifar.checks.repeated_step.tensors import names_of


@dataclass
class Twin:
    module: nn.Module
    optimizers: list[Optimizer]
    call: Callable[..., Any]
    sharded: bool = False  # whether the run's module is sharded
    may_be_part: bool = False  # whether ranks may hold different parts of a model
    hook: str = ""  # name of a communication hook, which averages gradients in its own way
    is_joined: bool = False  # whether it is in a `join()`, where ranks may have unlike numbers of batches
    model_parallel_size: int = 1  # number of ranks of the run that hold a replica together
    # The trainer's work between backward pass and step, such as clipping; None for a script, whose work is not known.
    before_step: Callable[[Optimizer], None] | None = None
    after_backward: Callable[[], object] = lambda: None  # the module's own work after a backward pass
    loss_gradient: Callable[[], float] | None = None  # gradient at which a backward pass begins, where it is known
    progress: Callable[[dict[str, Any]], None] = lambda progress: None
    own: Collection[Key] = ()  # attributes in which it differs from the run's module

    @torch.no_grad()
    def begin(self, start: Start) -> None:
        """Take the values that another rank begins with."""
        for parameter, name in names_of(self.module, self.optimizers).items():
            if name in start.values:
                parameter.copy_(start.values[name])
                for optimizer, states in zip(self.optimizers, start.states, strict=True):
                    optimizer.state.pop(parameter, None)
                    if name in states:
                        optimizer.state[parameter] = states[name]


@torch.no_grad()
def fill(
    module: nn.Module, *, buffers: Mapping[str, Tensor], attributes: Attributes, but: Collection[Key] = ()
) -> None:
    """Set another process's values, `but` these attributes. Raise an `UnjudgeableError` if one has no place."""
    try:
        attributes.fill(module, but=but)
    except KeyError as error:
        raise UnjudgeableError(f"the {error.args[0]} appears while training") from None
    own = dict(module.named_buffers())
    for name, buffer in buffers.items():
        if name not in own or own[name].shape != buffer.shape:
            raise UnjudgeableError(f"the buffer {name} appears or changes its size while training")
        own[name].copy_(buffer)


def what_cannot_be_judged(module: nn.Module, *, autocast: bool) -> list[str]:
    """Reasons why `module` cannot be judged; `autocast` tells whether it computes under autocast."""
    if absent := [error.problem for error in internals.missing(internals.REPLAY)]:
        return absent
    reasons = [*what_is_not_replayed(module, autocast=autocast)]
    in_place = any(part._compiled_call_impl is not None for part in module.modules())
    if in_place or getattr(module, "_compiler_ctx", None):  # a copy would lose it, or call the module itself
        reasons.append("what is compiled cannot be copied: write self.net = torch.compile(self.net), for a part of it")
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in module.parameters()):
        reasons.append("a lazy layer has no parameters yet")
    embeddings = (part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag))
    tensors = (*module.parameters(), *module.buffers())
    if any(part.sparse for part in embeddings) or any(tensor.layout is not torch.strided for tensor in tensors):
        reasons.append("sparse gradients and tensors are not compared")
    return reasons


def communication_hook(model: Any) -> str:
    """The name of the hook by which `DistributedDataParallel` averages gradients, empty without one."""
    return " and ".join(getattr(hook, "__name__", str(hook)) for hook, _ in getattr(model, "_comm_hooks", ()))


def twin_of(module: Module, optimizers: Sequence[Optimizer]) -> tuple[Module, list[Optimizer]]:
    """Copy a module, and optimizers that hold the copy's parameters, or raise an `UnjudgeableError`.

    For a sharded module every rank must call this.
    """
    memo: dict[int, Any] = {id(group): group for group in process_groups()}  # groups cannot be copied
    try:
        copied = whole_copy(module, memo) if is_sharded(module) else copy.deepcopy(module, memo)
        copies = [_optimizer_copy(optimizer, memo) for optimizer in optimizers]
    except Exception as error:  # a stranger's code may raise anything
        raise UnjudgeableError(f"{type(module).__name__} cannot be copied: {error}") from error
    names = {name: parameter for parameter, name in names_of(module, optimizers).items()}
    for parameter, name in names_of(copied, copies).items():
        # torch does not copy a stranger's hooks, nor existing gradients.
        parameter._backward_hooks = copy.copy(names[name]._backward_hooks)
        parameter.grad = None if (gradient := names[name].grad) is None else whole(gradient).clone()
    return copied, copies


def _optimizer_copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy all attributes of an optimizer but `step`, which a schedule may wrap, and hooks."""
    copied = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":
            vars(copied)[name] = type(value)() if name.endswith("_hooks") else copy.deepcopy(value, memo)
    for state in copied.state.values():
        state.update({key: whole(value) for key, value in state.items() if isinstance(value, Tensor)})
    return copied


class TwinState:
    """The values at the beginning of a segment."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._parameters = [*names_of(twin.module, twin.optimizers)]
        self._values = [parameter.detach().clone() for parameter in self._parameters]
        self._grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in self._parameters]
        self._states = [self._copied(optimizer.state) for optimizer in twin.optimizers]

    def _copied(self, state: Any) -> Any:
        """Copy a state, whose keys are the parameters themselves."""
        return copy.deepcopy(state, {id(parameter): parameter for parameter in self._parameters})

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, value, gradient in zip(self._parameters, self._values, self._grads, strict=True):
            parameter.copy_(value)
            parameter.grad = None if gradient is None else gradient.clone()
        for optimizer, state in zip(self._twin.optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(self._copied(state))


@contextmanager
def one_process(exchange: Handler, rank: Callable[[], int]) -> Iterator[None]:
    """Return a context without other ranks, which wait for this one: `exchange` answers in their place.

    This process has the rank `rank()` meanwhile. All generators and settings that a replay touches are put back.
    """
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    own = Surroundings.now(device)
    try:
        with intercepted(exchange, rank):
            yield
    finally:
        own.restore(device)
