"""gloo for tensors on a GPU that several processes share: each message goes through the memory of the host.

NCCL refuses two processes on one GPU. gloo takes tensors of a GPU for some messages alone: it neither sends them from
one process to another, which `pp` needs, nor averages parts of them, which `fsdp2` needs. For `verify` on a machine with
one GPU; not for speed.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

BACKEND = "host_gloo"
class _Message(dist._Work):
    """What gloo does with copies on the host; `results` are where they belong, and the copies."""

    def __init__(self, work: Any, results: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work, self._results = work, results

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        for tensor, copy in self._results:
            tensor.copy_(copy)
        self._results = []
        return True


class HostGloo(dist.ProcessGroup):
    """A process group of the backend `host_gloo`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self.gloo)

    @override
    def getBackendName(self) -> str:
        return BACKEND


def _through_host(name: str) -> Callable[..., dist._Work]:
    """The call `name` of gloo. Its first argument has what it returns, except that of `send`."""

    def call(group: HostGloo, *arguments: Any, **options: Any) -> dist._Work:
        found: list[tuple[Tensor, Tensor]] = []

        def on_host(tensor: Tensor) -> Tensor:
            found.append((tensor.detach(), tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)))
            return found[-1][1]

        first, *others = (tree_map_only(Tensor, on_host, each) for each in (*arguments, *options.values()))
        results = [] if name == "send" else found[: len(tree_leaves(first))]
        message = _Message(getattr(group.gloo, name)(first, *others), results)
        if name not in ("send", "recv"):  # only for these a process waits in another order than it asks
            message.wait()
        return message

    return call


# Two of them have other names from torch 2.14 on.
for _name in (
    *("allreduce", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv", "allgather", "reduce_scatter"),
    *("_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"),
):
    if hasattr(dist.ProcessGroupGloo, _name):
        setattr(HostGloo, _name, _through_host(_name))
dist.Backend.register_backend(BACKEND, HostGloo, devices=["cpu", "cuda"])
