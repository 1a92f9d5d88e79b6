"""Do the messages of a process group arrive? A broadcast from each rank and an all-reduce, of known integers."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from lit_cifar.copy_probe.copy_fault import SENTINEL, classify, size_of
from lit_cifar.copy_probe.pair_check import pattern
from lit_cifar.copy_probe.probe_process import START_S, Ended, ProbeError, reason, received, worker
from lit_cifar.launch.network_interfaces import listen_only_on, loopback_interface

COLLECTIVE_SIZES = (2**12, 2**20, 2**24)
"""In bytes."""
_EXACT_BITS = 48  # the sum of up to 2**15 ranks fits int64


class Collectives:
    """torch's collectives; a subclass can spoil them."""

    def broadcast(self, tensor: Tensor, *, root: int) -> None:
        """The content of `tensor` on rank `root`, on all ranks."""
        dist.broadcast(tensor, src=root)

    def all_reduce(self, tensor: Tensor) -> None:
        """The sum over ranks."""
        dist.all_reduce(tensor)


def collective_faults(
    backend: str,
    devices: Sequence[torch.device],
    *,
    sizes: Sequence[int] = COLLECTIVE_SIZES,
    limit_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
    collectives: Collectives | None = None,
) -> list[str]:
    """What went wrong when the processes of a group, one for each device, sent each other known integers.

    Args:
        backend: "nccl" or "gloo".
        devices: The device of each rank, at least two.
        sizes: Bytes of a message, multiples of 8.
        limit_s: Time for all messages together.
        environment: Variables of the processes, e.g. NCCL_P2P_DISABLE=1.
        collectives: What sends; by default torch.

    Returns:
        A sentence for each fault, without a full stop; an empty list if all messages arrived.

    Raises:
        ProbeError: The processes could not start.
    """
    task = (backend, devices, sizes, dict(environment or {}), collectives or Collectives())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ranks = [stack.enter_context(worker(_work, *task, f"{folder}/store", rank)) for rank in range(len(devices))]
        for rank, connection in enumerate(ranks):
            if isinstance(message := received(connection, START_S), Ended):
                raise ProbeError(f"the collectives of {backend} could not be probed: rank {rank}: {message.detail}")
        deadline = time.monotonic() + limit_s
        return [fault for rank, connection in enumerate(ranks) for fault in _of_rank(rank, connection, deadline)]


def _of_rank(rank: int, connection: Connection, deadline: float) -> Iterator[str]:
    doing = "the start"
    while (message := received(connection, deadline - time.monotonic())) is not None:
        if isinstance(message, Ended):
            if message.kind is None:
                raise ProbeError(f"the collectives could not be probed: rank {rank}: {message.detail}")
            yield f"{doing} {message.kind} on rank {rank}: {message.detail}"
            return
        doing, fault = message
        if fault:
            yield f"{doing} went wrong on rank {rank}: {fault}"


def _work(
    backend: str,
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    environment: Mapping[str, str],
    collectives: Collectives,
    store: str,
    rank: int,
    connection: Connection,
) -> None:
    """Send what is being done before it is done, and once more with its fault; None at the end."""
    os.environ.update(environment)
    listen_only_on(loopback_interface())
    device = devices[rank]
    try:
        torch.zeros(1, device=device)
        connection.send("ready")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=FileStore(store, len(devices)), rank=rank, world_size=len(devices))
        for number, num_bytes in enumerate(sizes):
            for what, arrived, expected in _messages(collectives, num_bytes // 8, number, rank, connection, device):
                wrong = not torch.equal(arrived, expected)
                connection.send((what, classify(arrived.cpu(), expected.cpu())[1] if wrong else ""))
        connection.send(None)
        connection.recv()  # the others may still need this process
    except EOFError:
        return
    except Exception as error:
        connection.send(reason(error))


def _messages(
    collectives: Collectives, num_words: int, number: int, rank: int, connection: Connection, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What was done, what this rank has now, and what it should have."""
    world_size, size = dist.get_world_size(), size_of(num_words * 8)
    of_rank = [
        pattern(num_words, number=number * world_size + other, device=device) & (2**_EXACT_BITS - 1)
        for other in range(world_size)
    ]
    for root in range(world_size):
        what = f"the broadcast of {size} from rank {root}"
        connection.send((what, ""))
        tensor = of_rank[root].clone() if rank == root else torch.full_like(of_rank[root], SENTINEL)
        collectives.broadcast(tensor, root=root)
        yield what, tensor, of_rank[root]
    what = f"the all-reduce of {size}"
    connection.send((what, ""))
    tensor = of_rank[rank].clone()
    collectives.all_reduce(tensor)
    yield what, tensor, torch.stack(of_rank).sum(0)
