"""Averages the gradients of processes on one machine's CPU in memory that they share.

gloo sends what processes on one machine tell each other through the kernel's TCP. On a CPU the processes need the same
cores for this and for computing: 85 MB of gradients cost each of two processes about 80 ms of a core. Reading the other
processes' memory instead costs about 10 ms.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

# What a core's cache holds of each process's bucket, while the values go from one to all.
_BLOCK_BYTES = 256 * 1024
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
            self._buckets[bucket.index()].average(rank=dist.get_rank(self._group))
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
        self._is_possible = self._agree(_has_room(buffer.nbytes * dist.get_world_size(self._group)))
        if not self._is_possible:
            return
        buffer.untyped_storage().share_memory_()  # in its place: all views of it are in shared memory now
        parts = self._parts(buffer)
        self._is_possible = self._agree(parts is not None)
        if parts is not None:
            self._buckets[bucket.index()] = _Bucket(buffer.data_ptr(), parts)

    def _parts(self, buffer: Tensor) -> list[Tensor] | None:
        """The bucket in every process; None where another one's memory cannot be opened."""
        descriptor, num_bytes = buffer.untyped_storage()._share_fd_cpu_()  # which the storage closes at its end
        paths: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{descriptor}", group=self._group)
        own = dist.get_rank(self._group)
        try:
            return [buffer if rank == own else _opened(path, buffer, num_bytes) for rank, path in enumerate(paths)]
        except OSError:  # e.g. of a container with processes of its own
            return None
        finally:
            dist.barrier(self._group)  # all have opened it

    def _agree(self, possible: bool) -> bool:
        votes = torch.tensor(int(possible))
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        return bool(votes)


@dataclass(frozen=True)
class _Bucket:
    """A bucket of every process, flat, in the order of the ranks."""

    address: int  # of this process's own
    parts: list[Tensor]

    def average(self, *, rank: int) -> None:
        """Average this process's part of the places."""
        num_parts = len(self.parts)
        own = [part.tensor_split(num_parts)[rank] for part in self.parts]
        size = _BLOCK_BYTES // own[0].itemsize
        for block in zip(*(torch.split(part, size) for part in own), strict=True):
            first, second, *others = block
            total = torch.add(first, second)
            for other in others:
                total += other
            total *= 1 / num_parts
            for part in block:
                part.copy_(total)


def _opened(path: str, buffer: Tensor, num_bytes: int) -> Tensor:
    """Another process's bucket, which lies in its memory as `buffer` in this one's."""
    if not os.access(path, os.R_OK | os.W_OK):
        raise OSError(path)
    whole = torch.from_file(path, shared=True, size=num_bytes // buffer.itemsize, dtype=buffer.dtype)
    return whole[buffer.storage_offset() :][: buffer.numel()]


def _has_room(num_bytes: int) -> bool:
    """Whether there is so much shared memory; a container may have only 64 MB of it."""
    try:
        free = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return False
    return free.f_bavail * free.f_frsize > num_bytes
