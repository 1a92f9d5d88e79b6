"""Batches as trees of tensors with samples along dimension 0: joined, divided, and their samples told apart."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lit_cifar.checks.repeated_step.digests import digest
from lit_cifar.internals import tree_flatten, tree_leaves, tree_unflatten


def joined(batches: Sequence[Any]) -> Any:
    """Join batches. Raise a `ValueError` where tensors are not divided by samples, or other values differ."""
    flat = [tree_flatten(batch) for batch in batches]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("the batches hold unlike numbers of things")
    return tree_unflatten([_joined(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1])


def _joined(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor) and first.dim():
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise ValueError("their samples have unlike shapes")
        return torch.cat([*leaves])
    if not all(bool(leaf == first) for leaf in leaves):
        raise ValueError("what is no tensor differs")
    return first


def num_samples(batch: Any) -> int:
    """Number of samples. Raise a `ValueError` if the batch's tensors have other lengths along dimension 0."""
    sizes = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise ValueError("its tensors are not all divided by samples")
    return sizes.pop()


def parted(batch: Any, count: int) -> list[Any]:
    """Divide a batch into `count` parts, of which the first hold one sample more where it cannot be divided evenly."""
    total = num_samples(batch)
    ends = [0, *(part * (total // count) + min(part, total % count) for part in range(1, count + 1))]
    leaves, spec = tree_flatten(batch)
    return [tree_unflatten([_rows(leaf, *place) for leaf in leaves], spec) for place in pairwise(ends)]


def in_batches_of(batches: Sequence[Any], size: int) -> Iterator[Any]:
    """The samples of `batches` in the same order, in batches of `size`, or in one of all for a size of 0.

    Where samples of two batches have unlike shapes, such as padded ones, each batch is divided in two.
    """
    if size == 1:
        yield from (part for batch in batches for part in parted(batch, num_samples(batch)))
        return
    try:
        one = joined(batches)
    except ValueError:
        yield from (part for batch in batches for part in parted(batch, min(2, num_samples(batch))))
        return
    leaves, spec = tree_flatten(one)
    total = num_samples(one)
    for start in range(0, total, size or total):
        yield tree_unflatten([_rows(leaf, start, start + (size or total)) for leaf in leaves], spec)


def _rows(leaf: Any, start: int, end: int) -> Any:
    return leaf[start:end] if isinstance(leaf, Tensor) and leaf.dim() else leaf


def row_digests(tensor: Tensor) -> list[int]:
    """A digest of each sample."""
    return [digest(row).bits for row in tensor] if tensor.dim() else [digest(tensor).bits]


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
