"""Whether a step is that of one batch: of those of all ranks, and of all that are accumulated, joined to one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lit_cifar.tools.replay.digests import Surroundings
from lit_cifar.tools.replay.events import Call

# Half of the digits of float32, in which a module may compute parts whatever it is given, as by `.float()`.
_BOUND = torch.finfo(torch.float32).eps ** 0.5


class JoinedBatch:
    """Compares the mean of the gradients of a step's batches with the gradient of one batch that holds them all.

    Both are computed in float64 and without autocast, so it is about mathematics and not about precision; and without
    dropout and statistics of batches, which nobody expects to be equal. Each is computed by a copy of its own, so it
    leaves nothing behind. Where a batch cannot be joined, random numbers are drawn, or a stranger's code raises an
    error, nothing is said.

    Args:
        copied: Makes a copy of a LightningModule that logs nothing.
    """

    def __init__(self, copied: Callable[[Any], Any], device: torch.device) -> None:
        self._copied, self._device = copied, device
        self._module: Any = None
        self._has_begun = False

    def begin(self, module: nn.Module) -> None:
        """To be called before the first call of a step, with what it begins with; later ones do nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        try:
            its = self._copied(module).double()
        except Exception:  # as of too little memory
            return
        for layer in its.modules():
            is_random = "Drop" in type(layer).__name__ or isinstance(layer, nn.MultiheadAttention)
            if is_random or hasattr(layer, "running_mean"):
                layer.training = False
        self._module = its

    def note(self, calls: Mapping[int, Sequence[Call]]) -> str:
        """What there is to say after that step, an empty text if nothing is; `calls` by rank."""
        its = [call for of_rank in calls.values() for call in of_rank]
        try:
            return self._compared(its) if self._module is not None and len(its) > 1 else ""
        except Exception:
            return ""
        finally:
            self._module = None

    def _compared(self, calls: Sequence[Call]) -> str:
        batches = [call.inputs[0][0] for call in calls]
        one, sizes = joined(batches), [*map(_size, batches)]
        mean = sum(self._gradient(batch, calls[0]) for batch in batches) / len(batches)
        expected = self._gradient(one, calls[0])
        share = float((mean - expected).norm() / expected.norm())
        numbers = f" ({len(sizes)} batches have {min(sizes)} to {max(sizes)})" if len({*sizes}) > 1 else ""
        text = (
            f"the step is not that of all its batches joined to one: its gradient is {100 * share:.3g} % away, as with "
            f"means over unlike numbers of tokens or samples{numbers}, sums, or a loss that compares samples"
        )
        return text if _BOUND < share < float("inf") else ""

    def _gradient(self, batch: Any, first: Call) -> Tensor:
        """Of the loss of a batch, in one piece; all else is as in the first call."""
        its = self._copied(self._module)
        _, dtype, _ = first.surroundings.autocast
        own = replace(first.surroundings, autocast=(False, dtype, False), default_dtype=torch.float64)
        with own.entered(self._device):
            before = Surroundings.now(self._device)
            result = its.training_step(*tree_map(_copied_as_double, (batch, *first.inputs[0][1:])), **first.inputs[1])
            loss = result["loss"] if isinstance(result, Mapping) else result
            loss.backward()
            after = Surroundings.now(self._device)
        if before.has_drawn(self._device) or (before.python, before.numpy) != (after.python, after.numpy):
            raise ValueError("random numbers are drawn, which are others for a joined batch")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in its.parameters()]
        return torch.cat([gradient.reshape(-1) for gradient in grads])


def joined(batches: Sequence[Any]) -> Any:
    """One batch; an error where their tensors are not divided by samples, or what is no tensor differs."""
    flat = [tree_flatten(batch) for batch in batches]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("the batches hold unlike numbers of things")
    return tree_unflatten([_joined(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1])


def _joined(leaves: Sequence[Any]) -> Any:
    if isinstance(leaves[0], Tensor) and leaves[0].dim():
        return torch.cat([*leaves])
    if not all(bool(leaf == leaves[0]) for leaf in leaves):
        raise ValueError("what is no tensor differs")
    return leaves[0]


def _size(batch: Any) -> int:
    """How many samples, or whatever its tensors are divided into."""
    (size,) = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    return size


def _copied_as_double(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    dtype = torch.float64 if leaf.is_floating_point() else leaf.dtype
    return leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad)
