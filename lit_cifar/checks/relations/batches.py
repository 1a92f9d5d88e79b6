"""Batches as trees of tensors with samples along dimension 0, or lists of samples: joined, divided, and told apart."""

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import pad

from lit_cifar.checks.tensors import dense, digest
from lit_cifar.internals import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten


class SampleList(list[Any]):
    """A list of samples, which is a leaf of the tree."""


class SampleTuple(tuple[Any, ...]):
    """A tuple of samples, which is a leaf of the tree."""


Samples: TypeAlias = SampleList | SampleTuple
_MOST_VALUES = 2**22  # of a step's samples that are told apart
# Of tokens that are padded on the right to the longest of a batch, as transformers does: what stands for none.
_PADDING = {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "labels": -100}


def open_mappings(batch: Any) -> None:
    """Let torch's trees see into mappings that are no `dict`, such as transformers' `BatchEncoding`."""
    for kind in {type(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, UserDict)}:
        register_pytree_node(kind, lambda tree: ([*tree.values()], [*tree]), partial(_closed, kind))


def _closed(kind: type[Any], values: Sequence[Any], names: Sequence[Any]) -> Any:
    return kind(dict(zip(names, values, strict=True)))


def with_sample_lists(batch: Any, size: int, like: Any = None) -> Any:
    """A batch of `size` samples in which lists of so many are leaves, such as those of `tuple(zip(*samples))`.

    It stays where all are rows of tensors, or the size tells no lists of samples, unless `like`, one before, does.
    """
    if isinstance(like, Samples):
        return type(like)(batch)
    columns = [*batch.values()] if type(batch) is dict else [*batch] if type(batch) in (list, tuple) else []
    is_list = [isinstance(column, list | tuple) and len(column) == size for column in columns]
    like_has_lists = any(isinstance(leaf, Samples) for leaf in tree_leaves(like))
    if type(batch) is not dict and len(columns) == size and not like_has_lists:
        return batch if any(is_list) or _are_rows(batch, size) else _as_samples(batch)
    if all(_are_rows(column, size) for column, listed in zip(columns, is_list, strict=True) if listed):
        return batch
    made = [_as_samples(column) if listed else column for column, listed in zip(columns, is_list, strict=True)]
    return dict(zip(batch, made, strict=True)) if isinstance(batch, dict) else type(batch)(made)


def _are_rows(tree: Any, size: int) -> bool:
    """Whether all that it holds are tensors with so many samples along dimension 0."""
    return all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size for leaf in tree_leaves(tree))


def _as_samples(items: Sequence[Any]) -> Samples:
    return SampleTuple(items) if isinstance(items, tuple) else SampleList(items)


def has_rows(leaf: Any) -> TypeGuard[Tensor | Samples]:
    return isinstance(leaf, Samples) or (isinstance(leaf, Tensor) and leaf.dim() > 0)


def joined(batches: Sequence[Any]) -> Any:
    """Join batches, those of tokens padded to the longest.

    Raise a `ValueError` where tensors are not divided by samples, or other values differ.
    """
    flat = [tree_flatten(batch) for batch in _of_equal_length(batches)]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("the batches hold unlike numbers of things")
    return tree_unflatten([_joined(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1])


def _joined(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if isinstance(first, Samples):
        return type(first)(sample for leaf in leaves for sample in leaf)
    if isinstance(first, Tensor) and first.dim():
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise ValueError("their samples have unlike shapes")
        return torch.cat([*leaves])
    if not all(bool(leaf == first) for leaf in leaves):
        raise ValueError("what is no tensor differs")
    return first


def _of_equal_length(batches: Sequence[Any]) -> list[Any]:
    """Batches whose tokens are padded to those of the longest, where a mask says what is padded, and on the right."""
    masks = [batch.get("attention_mask") if isinstance(batch, Mapping) else None for batch in batches]
    lengths = [mask.shape[1] for mask in masks if isinstance(mask, Tensor) and mask.dim() == 2 and mask[:, :1].all()]
    if len(lengths) < len(batches) or len(set(lengths)) == 1:
        return [*batches]

    def padded(name: Any, value: Any, length: int) -> Any:
        is_of_tokens = name in _PADDING and isinstance(value, Tensor) and value.shape[1:] == (length,)
        return pad(value, (0, max(lengths) - length), value=_PADDING[name]) if is_of_tokens else value

    pairs = zip(batches, lengths, strict=True)
    return [type(own)({name: padded(name, value, size) for name, value in own.items()}) for own, size in pairs]


def num_samples(batch: Any) -> int:
    """Number of samples. Raise a `ValueError` if the batch's tensors have other lengths along dimension 0."""
    sizes = {len(leaf) for leaf in tree_leaves(batch) if has_rows(leaf)}
    if len(sizes) != 1:
        raise ValueError("its tensors are not all divided by samples")
    return sizes.pop()


def parted(batch: Any, count: int) -> list[Any]:
    """Divide a batch into `count` parts, of which the first hold one sample more where it cannot be divided evenly."""
    size, more = divmod(num_samples(batch), count)
    return _cut(batch, [part * size + min(part, more) for part in range(count + 1)])


def in_batches_of(batches: Sequence[Any], size: int) -> Iterator[Any]:
    """The samples of `batches` in the same order, in batches of `size`, or in one of all for a size of 0.

    Where samples of two batches have unlike shapes, such as padded ones, each batch is divided in two.
    """
    try:
        one = joined(batches) if size != 1 else None
    except ValueError:
        one = None
    if one is None:
        for batch in batches:
            count = num_samples(batch)
            yield from parted(batch, count if size == 1 else min(2, count))
    else:
        total = num_samples(one)
        yield from _cut(one, [*range(0, total, size or total), total])


def _cut(batch: Any, ends: Sequence[int]) -> list[Any]:
    """The samples of a batch between each of these places and the next."""
    leaves, spec = tree_flatten(batch)
    return [tree_unflatten([_rows(leaf, *place) for leaf in leaves], spec) for place in pairwise(ends)]


def _rows(leaf: Any, start: int, end: int) -> Any:
    if isinstance(leaf, Samples):
        return type(leaf)(leaf[start:end])
    return leaf[start:end] if has_rows(leaf) else leaf


def sample_digests(batch: Any) -> list[int]:
    """Digests of the samples along dimension 0; none of a large batch, which would take too long."""
    leaves = [leaf for leaf in tree_leaves(batch) if has_rows(leaf)]
    if sum(tensor.numel() for leaf in leaves for tensor in tensors_in(leaf)) > _MOST_VALUES:
        return []
    rows = [_digests(leaf) for leaf in leaves if len(leaf) == len(leaves[0])]
    return rows[0] if len(rows) == 1 else [hash(values) for values in zip(*rows, strict=True)]


def _digests(rows: Tensor | Samples) -> list[int]:
    """A digest of each sample, without zeros at its end: it may be padded with others in another batch."""
    if isinstance(rows, Tensor):
        return [digest(_without_padding(row)) for row in dense(rows)]
    return [hash(tuple(digest(leaf) for leaf in tree_leaves(sample))) for sample in rows]


def _without_padding(row: Tensor) -> Tensor:
    """The row up to the last number other than 0 along each dimension."""
    if not row.dim():
        return row
    places = row.nonzero()
    return row[tuple(slice(int(last) + 1) for last in places.amax(0))] if len(places) else row.reshape(-1)[:0]


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors, also those of lists of samples."""
    leaves = tree_leaves(tree)
    inside = [tensor for leaf in leaves if isinstance(leaf, Samples) for tensor in tensors_in([*leaf])]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)] + inside
