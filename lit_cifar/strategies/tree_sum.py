"""Sums in the order of one fixed binary tree: the same bits however its leaves are divided over processes."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.14


class TreeSum:
    """The sum of n tensors that come one by one, in the order of a binary tree; at most log2(n) + 1 are kept.

    The first and the second are added, then the third and the fourth, then these two sums, and so on.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Tensor]] = []  # pairs of a number of tensors and their sum

    @property
    def count(self) -> int:
        return sum(count for count, _ in self._sums)

    def push(self, value: Tensor) -> None:
        count = 1
        while self._sums and self._sums[-1][0] == count:
            _, left = self._sums.pop()
            value, count = left + value, 2 * count
        self._sums.append((count, value))

    def take(self) -> Tensor:
        """Return the sum of all tensors, whose number must be a power of two, and forget them."""
        ((_, total),) = self._sums
        self.clear()
        return total

    def clear(self) -> None:
        self._sums = []


def in_tree_order(count: int) -> list[int]:
    """The numbers 0 to count - 1, sorted by their reversed bits: those that are equal modulo 2**k are neighbours."""
    width = count.bit_length() - 1
    return sorted(range(count), key=lambda number: int(f"{number:0{width}b}"[::-1], 2))


def tree_sum(values: Iterable[Tensor]) -> Tensor:
    """The sum of `values`, a power of two of them, in the order of the tree."""
    total = TreeSum()
    for value in values:
        total.push(value)
    return total.take()


def tree_all_reduce(flat: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of `flat`, (n,), over the processes of `group`, in the order of the tree over the parts that they hold.

    Each process adds up one slice and sends the sum to all others: as many bytes as a ring all-reduce sends.
    """
    padded = F.pad(flat, (0, -len(flat) % dist.get_world_size(group)))
    all_gather(padded, tree_reduce_scatter(padded, group=group), group=group)
    return padded[: len(flat)]


def tree_reduce_scatter(flat: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """This process's slice, (n / processes,), of the sum of `flat`, (n,), over the processes of `group`."""
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    num_processes = dist.get_world_size(group)
    slices = received.view(num_processes, -1)
    return tree_sum(slices[rank] for rank in in_tree_order(num_processes))
