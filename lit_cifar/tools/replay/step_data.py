"""Findings about the batches of a step: who read what, and with which random numbers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lit_cifar.tools.replay.digests import Surroundings, digest
from lit_cifar.tools.replay.events import Call
from lit_cifar.tools.replay.verdict import Finding, Report

_ENOUGH = 16  # values of a sample: fewer are easily equal by chance


def judge_batches(report: Report, step: int, calls: Mapping[int, Sequence[Call]]) -> None:
    """The same samples on several ranks, and batches of different sizes; `calls` by rank."""
    readers: dict[int, set[int]] = {}
    sizes = []
    for rank, its in calls.items():
        samples = [sample for call in its for sample in sample_digests(call.inputs)]
        report.counts["batches"] += len(its)
        report.counts["samples"] += len(samples)
        sizes.append(len(samples))
        for sample in samples:
            readers.setdefault(sample, set()).add(rank)
    shared = sum(len(ranks) > 1 for ranks in readers.values())
    if readers and shared >= len(readers) / 2 and len(calls) > 1:
        what = f"{shared} of {len(readers)} samples"
        report.findings.append(Finding("data", step, None, what, "were read by several ranks in the same step"))
    elif shared:
        report.note(f"step {step}: {shared} samples were read by several ranks, so they count twice")
    if len(set(sizes)) > 1:
        report.note(
            f"step {step}: ranks have {', '.join(map(str, sizes))} samples; the mean over ranks weighs the ranks "
            "alike, so samples differ in weight"
        )


def judge_draws(report: Report, draws: Mapping[int, Sequence[Surroundings]]) -> None:
    """Random numbers that several ranks have drawn alike; `draws`: the generators of calls that used them, by rank."""
    first = draws.get(0, [])
    for rank, drawn in draws.items():
        if rank and any(torch.equal(a.cpu, b.cpu) for a, b in zip(first, drawn, strict=False)):
            report.note("several ranks draw the same random numbers, so dropout has the same masks on them")


def sample_digests(inputs: Any) -> Iterator[int]:
    """A digest of each sample, if all tensors of the batch have a common first dimension, and one has enough values."""
    leaves = [leaf for leaf in tree_leaves(inputs[0][:1] or inputs[1]) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if len({len(leaf) for leaf in leaves}) != 1 or max(leaf[:1].numel() for leaf in leaves) < _ENOUGH:
        return
    for place in range(len(leaves[0])):
        yield hash(tuple(digest(leaf[place]).bits for leaf in leaves))
