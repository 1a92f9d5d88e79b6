"""Memory that processes on one machine's CPU share, in place of messages.

gloo sends what processes on one machine tell each other through the kernel's TCP. On a CPU the processes need the same
cores for this and for computing: 85 MB of gradients cost each of two processes about 80 ms of a core. Reading the other
processes' memory instead costs about 10 ms.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

# What a core's cache holds of each process's bucket, while the values go from one to all.
_BLOCK_BYTES = 256 * 1024
_ALIGNMENT = 64  # bytes: of any type of values
_SHARED_MEMORY = "/dev/shm"  # where torch takes it from


class SharedAverage:
    """A communication hook of DistributedDataParallel (`register_comm_hook`) with its state.

    Each process averages its part of a bucket and writes the values into all processes' buckets. An average is the sum
    in the order of the ranks, times one over their number: with two processes the same bits as gloo's all-reduce of
    gradients that were divided before.

    Args:
        group: The processes, all on one machine.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets: dict[int, _Bucket] = {}
        self._is_possible = True

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The averaged bucket, in its place."""
        if self._is_possible:
            self._open(bucket)
        if self._is_possible:
            dist.barrier(self._group)
            average_part(self._buckets[bucket.index()].parts, rank=dist.get_rank(self._group))
            dist.barrier(self._group)
        else:
            dist.all_reduce(bucket.buffer().div_(dist.get_world_size(self._group)), group=self._group)
        average: torch.futures.Future[Tensor] = torch.futures.Future()
        average.set_result(bucket.buffer())
        return average

    def _open(self, bucket: GradBucket) -> None:
        """Move a bucket into shared memory and find it in the other processes; DDP makes new ones after a step."""
        buffer, known = bucket.buffer(), self._buckets.get(bucket.index())
        if known is not None and known.address == buffer.data_ptr():
            return
        parts = in_all_processes(buffer, self._group)
        self._is_possible = parts is not None
        if parts is not None:
            self._buckets[bucket.index()] = _Bucket(buffer.data_ptr(), parts)


@dataclass(frozen=True)
class _Bucket:
    """A bucket of every process, flat, in the order of the ranks."""

    address: int  # of this process's own
    parts: list[Tensor]


def average_part(buffers: Sequence[Tensor], *, rank: int) -> None:
    """Average the part of the flat `buffers` that falls to `rank`, and write it into all of them."""
    count = len(buffers)
    own = [buffer.tensor_split(count)[rank] for buffer in buffers]
    size = _BLOCK_BYTES // own[0].itemsize
    for block in zip(*(torch.split(part, size) for part in own), strict=True):
        total = sum_in_order(block)
        total *= 1 / count
        for part in block:
            part.copy_(total)


def sum_in_order(values: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """The sum of two tensors or more, in their order; in `out` if that is given."""
    first, second, *others = values
    total = torch.add(first, second, out=out)
    for other in others:
        total += other
    return total


class SharedSlots:
    """Two places in shared memory for each process, into which it writes in turn what the others should read.

    Args:
        group: The processes, all on one machine.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._slots: list[Tensor] = []  # of each process, uint8, (2, bytes)
        self._is_possible = True
        self._turn = 0

    def exchange(self, message: Tensor) -> list[Tensor] | None:
        """The flat `message` of every process, in the order of the ranks; None where no memory can be shared.

        All processes call it with messages of equal size. What it returns stays until the next call but one: then all
        have made the next call, and so have read what they needed.
        """
        if self._is_possible and (not self._slots or self._slots[0].shape[1] < message.nbytes):
            self._open(message.nbytes)
        if not self._is_possible:
            return None
        self._turn = 1 - self._turn
        places = [slots[self._turn, : message.nbytes].view(message.dtype) for slots in self._slots]
        places[dist.get_rank(self._group)].copy_(message)
        dist.barrier(self._group)
        return places

    def _open(self, num_bytes: int) -> None:
        aligned = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        slots = in_all_processes(torch.empty(2, aligned, dtype=torch.uint8), self._group)
        self._is_possible = slots is not None
        self._slots = slots or []


def in_all_processes(buffer: Tensor, group: dist.ProcessGroup) -> list[Tensor] | None:
    """The contiguous `buffer` of each process, in the order of the ranks; None if memory cannot be shared.

    Its storage moves into shared memory, in its place. All processes call this with buffers of equal size and get None
    together: where one has no room for all, or may not open another one's memory.
    """
    if not _agree(_has_room(buffer.nbytes * dist.get_world_size(group)), group):
        return None
    buffer.untyped_storage().share_memory_()  # in its place: all views of it are in shared memory now
    buffers = _of_all(buffer, group)
    return buffers if _agree(buffers is not None, group) else None


def _of_all(buffer: Tensor, group: dist.ProcessGroup) -> list[Tensor] | None:
    """The buffer in every process; None where another one's memory cannot be opened."""
    descriptor, num_bytes = buffer.untyped_storage()._share_fd_cpu_()  # which the storage closes at its end
    paths: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{descriptor}", group=group)
    own = dist.get_rank(group)
    try:
        return [buffer if rank == own else _opened(path, buffer, num_bytes) for rank, path in enumerate(paths)]
    except OSError:  # e.g. of a container with processes of its own
        return None
    finally:
        dist.barrier(group)  # all have opened it


def _agree(possible: bool, group: dist.ProcessGroup) -> bool:
    votes = torch.tensor(int(possible))
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes)


def _opened(path: str, buffer: Tensor, num_bytes: int) -> Tensor:
    """Another process's bucket, which lies in its memory as `buffer` in this one's."""
    if not os.access(path, os.R_OK | os.W_OK):
        raise OSError(path)
    whole = torch.from_file(path, shared=True, size=num_bytes // buffer.itemsize, dtype=buffer.dtype)
    return whole[buffer.storage_offset() :][: buffer.numel()].view(buffer.shape)


def _has_room(num_bytes: int) -> bool:
    """Whether there is so much shared memory; a container may have only 64 MB of it."""
    try:
        free = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return False
    return free.f_bavail * free.f_frsize > num_bytes
