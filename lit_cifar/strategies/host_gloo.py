"""gloo for tensors on a GPU that several processes share: each message goes through the memory of the host.

NCCL refuses two processes on one GPU. gloo takes tensors of a GPU for some messages alone: it neither sends them from
one process to another (`pp`), nor scatters their sums (`fsdp2`). This is for `verify` on one GPU, not for speed.
"""

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lit_cifar.internals import tree_leaves, tree_map_only

BACKEND = "host_gloo"


class _Message(dist.Work):
    """A message of copies in host memory; `results` are pairs of a tensor and the copy that `wait` writes into it."""

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
        super().__init__(rank, size)  # type: ignore[call-arg]  # this constructor is not in torch's stubs
        # gloo's threads let go of a message some time after it has ended. Theirs must not be the last reference to a
        # tensor: to free it they would wait for the interpreter, which may wait for them.
        self.kept: deque[Any] = deque(maxlen=64)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self.gloo)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND


def _through_host(name: str) -> Callable[..., dist.Work]:
    """The call `name` of gloo. Its first argument receives the results, except in `send`."""

    def call(group: HostGloo, *arguments: Any, **options: Any) -> dist.Work:
        found: list[tuple[Tensor, Tensor]] = []

        def on_host(tensor: Tensor) -> Tensor:
            found.append((tensor.detach(), tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)))
            return found[-1][1]

        first, *others = (tree_map_only(Tensor, on_host, each) for each in (*arguments, *options.values()))
        results = [] if name == "send" else found[: len(tree_leaves(first))]
        group.kept.append((first, others))
        message = _Message(getattr(group.gloo, name)(first, *others), results)
        if name not in ("send", "recv"):  # processes may wait for these two in a different order
            message.wait()
        return message

    return call


def _one_by_one(name: str) -> Callable[..., dist.Work]:
    """The call for several pairs of tensors that torch's functional collectives, such as DTensor's, use for one."""

    def call(group: HostGloo, results: list[Tensor], tensors: list[Tensor], *options: Any) -> dist.Work:
        send = getattr(group, name)
        *_, last = (send(result, tensor, *options) for result, tensor in zip(results, tensors, strict=True))
        return cast(dist.Work, last)

    return call


# Torch 2.14 has other names for the last four.
_OLDER, _NEWER = ("_allgather_base", "_reduce_scatter_base"), ("all_gather_single", "reduce_scatter_single")
_PAIRS = ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
_SAME = "allreduce broadcast reduce gather scatter barrier send recv allgather reduce_scatter"
for _name in (*_SAME.split(), *_OLDER, *_NEWER):
    if hasattr(dist.ProcessGroupGloo, _name):
        setattr(HostGloo, _name, _through_host(_name))
for _name, _pairs in zip(_OLDER, _PAIRS, strict=True):
    setattr(HostGloo, _pairs, _one_by_one(_name))
for _name in _NEWER:
    setattr(HostGloo, f"{_name}_coalesced", _one_by_one(_name))
dist.Backend.register_backend(BACKEND, HostGloo, devices=["cpu", "cuda"])
