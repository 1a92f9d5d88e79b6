"""Hints: observations on a recorded rank that are often a mistake and never the proof of one."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_cifar.checks.repeated_step.digests import Digest, Surroundings, digest
from lit_cifar.checks.repeated_step.events import Call


class Hints:
    """Texts about schedules, backward passes, loss scaling, and parameters that are not trained, until `close`."""

    def __init__(self, module: nn.Module, device: torch.device, is_changed: Callable[[Optimizer], bool]) -> None:
        self.module, self._device, self._is_changed = module, device, is_changed
        self._texts: dict[str, None] = {}
        self._scheduled: Counter[LRScheduler] = Counter()  # steps of schedules since an optimizer's last step
        self._rates: dict[Optimizer, list[float]] = {}  # rates at the first call since its last step
        self._reached: set[str] = set()
        self._versions: dict[str, int] = {}  # versions of gradients at the last call or backward pass
        self._at_backward: tuple[Surroundings, dict[str, Digest]]
        self._watched = ExitStack()
        self._watched.enter_context(_before(LRScheduler, "step", lambda s, *_, **__: self._scheduled.update([s])))
        self._watched.enter_context(_before(torch.amp.GradScaler, "unscale_", self._unscaled))

    def close(
        self, names: Mapping[Tensor, str], optimizers: Sequence[Collection[Tensor]], *, num_unknown: int
    ) -> list[str]:
        """Return all texts; `optimizers` holds the parameters of each, `num_unknown` have no name and take part."""
        self._watched.close()
        if num_unknown:
            text = "parameters that the loss depends on are in no module and no optimizer, as in a list"
            self._add(f"{num_unknown} {text}")
        held = {names[parameter] for parameters in optimizers for parameter in parameters if parameter in names}
        trained = {names[parameter] for parameter in names if parameter.requires_grad}
        if lost := sorted(self._reached - held):
            self._add(_some(lost, len(trained), "gets a gradient, and is in no optimizer"))
        if self._reached and (idle := sorted((held & trained) - self._reached)):
            self._add(_some(idle, len(held & trained), "is in an optimizer, and no loss reaches it"))
        return [*self._texts]

    def begins(self, optimizers: Sequence[Optimizer]) -> None:
        """Look at learning rates when a call begins: they belong to a step and not to a microbatch."""
        self._versions = self._versions_now()
        for optimizer in optimizers:
            rates = [float(group.get("lr") or 0.0) for group in optimizer.param_groups]
            if self._rates.setdefault(optimizer, rates) != rates:
                self._add("a learning rate changes between the microbatches of a step")

    def called(self, call: Call) -> None:
        """Look at frozen layers that normalise by the batch, and at gradients, when a call has ended."""
        if any(self._versions.get(name, version) != version for name, version in self._versions_now().items()):
            self._add("a call changes gradients of the pass before it, as by clipping too early")
        for path, layer in self.module.named_modules():
            own = [*layer.parameters(recurse=False)]
            if own and layer.training and not any(parameter.requires_grad for parameter in own):
                names = [name for name, _ in layer.named_buffers(path, recurse=False)]
                if any(n in call.buffers and digest(call.buffers[n]).bits != call.buffers_after[n].bits for n in names):
                    self._add(f"{path} is frozen, and still changes its buffers: it needs eval mode")

    def reached(self, names: Collection[str]) -> None:
        self._reached |= set(names)

    def begins_backward(self, surroundings: Surroundings) -> None:
        self._at_backward = surroundings, self._buffers()

    def ended_backward(self) -> None:
        """Look for random numbers and changed buffers, such as from a forward pass that is computed again."""
        surroundings, buffers = self._at_backward
        if surroundings.has_drawn(self._device):
            self._add("a backward pass draws random numbers, as dropout that is computed again with other masks")
        if changed := [name for name, found in self._buffers().items() if found.bits != buffers[name].bits]:
            self._add(f"a backward pass changes {changed[0]}, as statistics that count a batch twice")
        self._versions = {}

    def stepped(self, optimizer: Optimizer) -> None:
        self._rates.pop(optimizer, None)
        if any(number > 1 for number in self._scheduled.values()):
            self._add("a schedule makes several steps between two steps of an optimizer")
        self._scheduled.clear()

    def sent_beside(self, tensors: Sequence[Tensor]) -> None:
        if torch.is_grad_enabled() and any(tensor.grad_fn is not None for tensor in tensors):
            self._add("ranks exchange what a loss may be computed of, by a collective that no gradient passes")

    def _unscaled(self, scaler: Any, optimizer: Optimizer, *_: Any) -> None:
        if scaler.is_enabled() and self._is_changed(optimizer):
            self._add("gradients change, as by clipping, before the scale of the loss is taken out of them")

    def _buffers(self) -> dict[str, Digest]:
        return {name: digest(buffer) for name, buffer in self.module.named_buffers()}

    def _versions_now(self) -> dict[str, int]:
        return {name: p.grad._version for name, p in self.module.named_parameters() if p.grad is not None}

    def _add(self, text: str) -> None:
        self._texts[text] = None


def _some(names: Sequence[str], number: int, text: str) -> str:
    """A text about one of `number` parameters, or several."""
    if len(names) == 1:
        return f"{names[0]} {text}"
    return f"{len(names)} of {number} parameters, {names[0]} among them: each {text}"


def _before(owner: type, name: str, look: Callable[..., None]) -> Any:
    """Let `look` see the arguments of each call of a method."""
    real = getattr(owner, name)

    @wraps(real)
    def method(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return real(*args, **kwargs)

    return patch.object(owner, name, method)
