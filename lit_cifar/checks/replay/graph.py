"""The outputs of recorded calls at which a backward pass begins, found in the graph of autograd."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lit_cifar import internals

# With find_unused_parameters or a static graph DDP passes all outputs, unchanged, through one node.
_SINK = "_DDPSinkBackward"


def observed(before: Callable[[list[Tensor]], None], after: Callable[[], None]) -> Any:
    """A context in which `before` gets the roots of each backward pass, and `after` is called when it has ended."""
    real = torch.autograd.backward

    @wraps(real)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        outermost = internals.current_graph_task_id() == -1  # an inner pass is a checkpoint's, a part of its call
        if outermost:
            before(internals.tree_leaves(tensors))
        real(tensors, *args, **kwargs)
        if outermost:
            after()

    return patch.object(torch.autograd, "backward", backward)


class Outputs:
    """The outputs of calls, as nodes of the graph.

    A replay has to begin with the gradients that come to an output from outside of its call. It finds the gradients
    from inside by itself, such as those to the logits of a call that returns its loss too.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self.begun: set[Node] | None = None  # outputs at which the last backward pass begins; None before the first
        self.unknown: set[Tensor] = set()  # parameters inside of calls that have no name
        self._names = names
        self._calls: list[set[Node]] = []
        self._num_old = 0  # calls before the last backward pass

    def add(self, leaves: Sequence[Tensor]) -> None:
        self._calls.append({leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None})

    def begin(self, roots: Sequence[Tensor]) -> Iterator[str]:
        """Find `begun`, and yield reasons why the replay could not repeat this pass."""
        call_of = {node: call for call, nodes in enumerate(self._calls) for node in nodes}
        self.begun = set()
        inside: set[Node] = set()
        beside: set[str] = set()
        waiting: list[tuple[Node, int, int | None]] = [
            (root.grad_fn, root.output_nr, None) for root in roots if root.grad_fn is not None
        ]
        seen = set(waiting)
        while waiting:
            node, place, call = waiting.pop()
            to = call_of.get(node)
            if to is not None:
                (inside if to == call else self.begun).add(node)
                call = to
            leaf: Any = getattr(node, "variable", None)
            if call is None and leaf in self._names:
                beside.add(self._names[leaf])
            if call is not None and isinstance(leaf, nn.Parameter) and leaf not in self._names:
                self.unknown.add(leaf)
            following = node.next_functions
            if node.name() == _SINK:
                following = following[place : place + 1]
            news = {(upstream, number, call) for upstream, number in following if upstream is not None} - seen
            seen |= news
            waiting += news
        if beside:
            yield f"the loss depends on {min(beside)} beside what calls return, as by a penalty or a part called alone"
        if inside & self.begun:
            yield "the loss depends on an output of a call, and on another one that the call computes from it"
        if any(call_of[node] < self._num_old for node in self.begun):
            yield "a backward pass begins at the outputs of a call that is older than the pass before it"
        self._num_old = len(self._calls)
