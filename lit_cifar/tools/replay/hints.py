"""What is often a mistake and never the proof of one, seen on a rank while it is recorded."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_cifar.tools.replay.digests import digest
from lit_cifar.tools.replay.events import Call


class Hints:
    """Texts about schedules, loss scaling, and parameters that are not trained, until `close`.

    Args:
        is_changed: Whether an optimizer's gradients are others than after the last backward pass.
    """

    def __init__(self, module: nn.Module, is_changed: Callable[[Optimizer], bool]) -> None:
        self.module, self._is_changed = module, is_changed
        self._texts: dict[str, None] = {}
        self._scheduled: Counter[LRScheduler] = Counter()  # steps of schedules since the last one of an optimizer
        self._reached: set[str] = set()
        self._watched = ExitStack()
        self._watched.enter_context(_before(LRScheduler, "step", lambda its: self._scheduled.update([its])))
        self._watched.enter_context(_before(torch.amp.GradScaler, "unscale_", self._unscaled))

    def close(self, names: Mapping[Tensor, str], optimizers: Sequence[Collection[Tensor]]) -> list[str]:
        """All texts; `optimizers`: the parameters of each."""
        self._watched.close()
        held = {names[its] for parameters in optimizers for its in parameters if its in names}
        trained = {names[its] for its in names if its.requires_grad}
        if lost := sorted(self._reached - held):
            self._add(f"{lost[0]} gets a gradient, and is in no optimizer")
        if self._reached and (idle := sorted((held & trained) - self._reached)):
            self._add(f"{idle[0]} is in an optimizer, and no loss reaches it")
        return [*self._texts]

    def called(self, call: Call) -> None:
        """A call has ended: look at frozen layers that normalise by the batch."""
        for path, its in self.module.named_modules():
            own = [*its.parameters(recurse=False)]
            if own and its.training and not any(parameter.requires_grad for parameter in own):
                names = [f"{path}.{name}".lstrip(".") for name, _ in its.named_buffers(recurse=False)]
                if any(n in call.buffers and digest(call.buffers[n]).bits != call.buffers_after[n].bits for n in names):
                    self._add(f"{path} is frozen, and still changes its buffers: it needs eval mode")

    def reached(self, names: Collection[str]) -> None:
        """A backward pass has given gradients to these."""
        self._reached |= set(names)

    def met_unknown(self, number: int) -> None:
        """So many parameters take part in calls, and have no name."""
        if number:
            self._add(f"{number} parameters that the loss depends on are in no module and no optimizer, as in a list")

    def stepped(self) -> None:
        """An optimizer has made a step."""
        if any(number > 1 for number in self._scheduled.values()):
            self._add("a schedule makes several steps between two steps of an optimizer")
        self._scheduled.clear()

    def sent_beside(self, tensors: Sequence[Tensor]) -> None:
        """Ranks exchange these outside of calls."""
        if torch.is_grad_enabled() and any(its.grad_fn is not None for its in tensors):
            self._add("ranks exchange what a loss may be computed of, by a collective that no gradient passes")

    def _unscaled(self, scaler: Any, optimizer: Optimizer, *_: Any) -> None:
        if scaler.is_enabled() and self._is_changed(optimizer):
            self._add("gradients change, as by clipping, before the scale of the loss is taken out of them")

    def _add(self, text: str) -> None:
        self._texts[text] = None


@contextmanager
def _before(owner: type, name: str, look: Callable[..., None]) -> Iterator[None]:
    """Let `look` see the arguments of each call of a method."""
    real = getattr(owner, name)

    @wraps(real)
    def method(*args: Any, **kwargs: Any) -> Any:
        look(*args)
        return real(*args, **kwargs)

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, real)
