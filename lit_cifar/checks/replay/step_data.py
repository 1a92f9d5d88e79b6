"""The batches of a step: their readers, their random numbers, and whether the step is that of one joined batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lit_cifar.checks.repeated_step.batches import joined, num_samples
from lit_cifar.checks.repeated_step.digests import Surroundings, digest
from lit_cifar.checks.repeated_step.events import Call
from lit_cifar.checks.replay.verdict import Finding, Report
from lit_cifar.internals import tree_leaves, tree_map

Generators: TypeAlias = tuple[int, ...]  # digests of their states
_TOO_FEW = "whether ranks read the same, as batches hold too few values"
_ENOUGH = 16  # fewest values of a sample: fewer are easily equal by chance
# Half of the digits of float32, in which a module may compute parts whatever its input, such as by `.float()`.
_BOUND = torch.finfo(torch.float32).eps ** 0.5


def judge_batches(report: Report, step: int, calls: Mapping[int, Sequence[Call]]) -> None:
    """Judge samples that several ranks read, and batches of different sizes; `calls` are by rank."""
    readers: dict[int, set[int]] = {}
    samples = {rank: [sample for call in own for sample in sample_digests(call.inputs)] for rank, own in calls.items()}
    sizes = [*map(len, samples.values())]
    of_samples = all(sizes)
    unit = "samples" if of_samples else "batches"
    report.counts["batches"] += sum(map(len, calls.values()))
    report.counts["samples"] += sum(sizes)
    for rank, own in calls.items():
        for sample in samples[rank] if of_samples else filter(None, map(batch_digest, own)):
            readers.setdefault(sample, set()).add(rank)
    if not readers and len(calls) > 1 and _TOO_FEW not in report.not_looked_at:
        report.not_looked_at.append(_TOO_FEW)
    shared = sum(len(ranks) > 1 for ranks in readers.values())
    if readers and shared >= len(readers) / 2 and len(calls) > 1:
        what = f"{shared} of {len(readers)} {unit}"
        report.findings.append(Finding("data", step, None, what, "were read by several ranks in the same step"))
    elif shared:
        report.note(f"step {step}: {shared} {unit} were read by several ranks, so they count twice")
    if len(set(sizes)) > 1:
        report.note(
            f"step {step}: ranks have {', '.join(map(str, sizes))} samples; the mean over ranks weighs the ranks "
            "alike, so samples differ in weight"
        )


def judge_draws(report: Report, draws: Mapping[int, Sequence[Surroundings]], module: nn.Module) -> None:
    """Note random numbers that several ranks have drawn alike; `draws` are the generators of calls, by rank."""
    has_dropout = any("Dropout" in type(layer).__name__ for layer in module.modules())
    so = ", so dropout has the same masks on them" if has_dropout else " inside their steps"
    for rank, drawn in draws.items():
        if rank and any(torch.equal(a.cpu, b.cpu) for a, b in zip(draws[0], drawn, strict=False)):
            report.note(f"several ranks draw the same random numbers{so}")


def judge_draws_between(report: Report, generators: Mapping[int, Sequence[tuple[Generators, Generators]]]) -> None:
    """Note random numbers that several ranks draw alike between steps, such as by augmentation in the process itself.

    `generators` are digests of their states at the beginning and at the end of each call of an epoch, by rank. A loader
    draws a number too, when an epoch begins: only draws before each of these steps are judged.
    """
    for rank, each in generators.items():
        for kind in range(len(each[0][0])):
            begun, first = ([begin[kind] for begin, _ in one[1:]] for one in (each, generators[0]))
            is_drawn = len(begun) > 1 and all(end[kind] != begin for (_, end), begin in zip(each, begun, strict=False))
            if rank and is_drawn and begun == first:
                report.note("ranks draw the same random numbers between steps, so augmentation is equal on them")


def batch_digest(call: Call) -> int:
    """Digest of a call's inputs; 0 if these are too few to tell them from others."""
    leaves = [leaf for leaf in tree_leaves(call.inputs) if isinstance(leaf, Tensor)]
    is_much = sum(torch.unique(leaf).numel() for leaf in leaves) >= _ENOUGH
    return hash(tuple(digest(leaf).bits for leaf in leaves)) if is_much else 0


def sample_digests(inputs: Any) -> Iterator[int]:
    """A digest of each sample, if all tensors of the batch have a common first dimension, and one has enough values."""
    leaves = [leaf for leaf in tree_leaves(inputs[0][:1] or inputs[1]) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if len({len(leaf) for leaf in leaves}) != 1 or max(leaf[:1].numel() for leaf in leaves) < _ENOUGH:
        return
    for place in range(len(leaves[0])):
        yield hash(tuple(digest(leaf[place]).bits for leaf in leaves))


class JoinedBatch:
    """Compares the mean of the gradients of a step's batches with the gradient of one batch that holds them all.

    Both are computed in float64 and without autocast, so that precision plays no part; and without dropout and
    statistics of batches, which nobody expects to be equal. Each is computed by a copy of its own, made by `copied`,
    which logs nothing, so nothing is left behind. Nothing is reported where a batch cannot be joined, random numbers
    are drawn, or a stranger's code raises an error.
    """

    def __init__(self, copied: Callable[[Any], Any], device: torch.device) -> None:
        self._copied, self._device = copied, device
        self._module: Any = None
        self._has_begun = False

    def begin(self, module: nn.Module) -> None:
        """Copy `module` as it is before the first call of a step; later calls do nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        try:
            copied = self._copied(module).double()
        except Exception:  # such as too little memory
            return
        for layer in copied.modules():
            is_random = "Drop" in type(layer).__name__ or isinstance(layer, nn.MultiheadAttention)
            if is_random or hasattr(layer, "running_mean"):
                layer.training = False
        self._module = copied

    def note(self, calls: Mapping[int, Sequence[Call]]) -> str:
        """A note if the gradients of the step differ, otherwise an empty text; `calls` are by rank."""
        all_calls = [call for of_rank in calls.values() for call in of_rank]
        try:
            return self._compared(all_calls) if self._module is not None and len(all_calls) > 1 else ""
        except Exception:
            return ""
        finally:
            self._module = None

    def _compared(self, calls: Sequence[Call]) -> str:
        batches = [call.inputs[0][0] for call in calls]
        one, sizes = joined(batches), [*map(num_samples, batches)]
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
        """The gradient of the loss of a batch, in one piece; all else is as in the first call."""
        twin = self._copied(self._module)
        _, dtype, _ = first.surroundings.autocast
        own = replace(first.surroundings, autocast=(False, dtype, False), default_dtype=torch.float64)
        with own.entered(self._device):
            before = Surroundings.now(self._device)
            result = twin.training_step(*tree_map(_copied_as_double, (batch, *first.inputs[0][1:])), **first.inputs[1])
            loss = result["loss"] if isinstance(result, Mapping) else result
            loss.backward()
            after = Surroundings.now(self._device)
        if before.has_drawn(self._device) or (before.python, before.numpy) != (after.python, after.numpy):
            raise ValueError("random numbers are drawn, which are others for a joined batch")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
        return torch.cat([gradient.reshape(-1) for gradient in grads])


def _copied_as_double(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    dtype = torch.float64 if leaf.is_floating_point() else leaf.dtype
    return leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad)
