"""What ranks send one another inside a step, as SyncBatchNorm and contrastive losses do.

A recorder writes down what a rank has sent and received; in a replay it receives the same again. Gradients that
`DistributedDataParallel` averages are no part of it: they do not pass through Python.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lit_cifar import internals
from lit_cifar.tools.replay.digests import Digest, digest
from lit_cifar.tools.replay.reduction import ExactMean

# Methods of a process group, to which all functions of torch.distributed come down: the arguments that hold what is
# received and what is sent.
_MOVED = ("allgather", "_allgather_base", "alltoall", "alltoall_base", "scatter", "gather")
_PLACES = {"allreduce": (0, 0), "broadcast": (0, 0)} | dict.fromkeys(
    (*_MOVED, "reduce_scatter", "_reduce_scatter_base"), (0, 1)
)
_NOT_REPLAYED = (
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced", "recv", "recv_anysource"),
    *("reduce", "reduce_scatter_tensor_coalesced", "send"),
)
_REDUCTIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")


@dataclass
class Exchange:
    """A collective, as one rank saw it."""

    name: str
    group: list[int]  # ranks
    option: str  # which reduction, or the place of the sender in the group
    sent: list[Tensor]
    received: list[Tensor]


_ONE_BY_ONE = ("send", "recv", "recv_anysource")

# Called with a collective's name, the real method, the process group and its arguments.
Handler: TypeAlias = Callable[..., Any]


@contextmanager
def intercepted(handler: Handler, rank: Callable[[], int] | None = None) -> Iterator[None]:
    """Let `handler` see each collective that Python code starts, however it has imported it.

    With `rank`, this process has that rank in all groups as long.
    """
    group_type: Any = dist.ProcessGroup
    replaced = {name: _method(handler, name, getattr(group_type, name)) for name in (*_PLACES, *_NOT_REPLAYED)}
    if rank is not None:
        replaced["rank"] = lambda group: dist.get_process_group_ranks(group).index(rank())
    with patch.multiple(group_type, **replaced):
        yield


def _method(handler: Handler, name: str, real: Any) -> Any:
    def called(group: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(name, real, group, *args, **kwargs)

    return called


def process_groups() -> list[Any]:
    """Those that this process has made or joined."""
    return [*internals.world.pg_map]


def can_be_replayed(name: str) -> bool:
    return name in _PLACES


def is_of_parts(name: str, tensors: Sequence[Any], outputs: Collection[Digest]) -> bool:
    """Whether parts of a model exchange data so: one by one, or by a broadcast of what a call has returned."""
    if name != "broadcast":
        return name in _ONE_BY_ONE
    return any(its.numel() > 1 and digest(its) in outputs for its in internals.tree_leaves(tensors))


def completed(name: str, real: Any, group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Exchange]:
    """The result of the collective, which has ended, and what it has moved."""
    sent = [tensor.detach().clone() for tensor in sent_by(name, args)]
    work = real(group, *args, **kwargs)
    if work is not None:
        work.wait()
    received = [tensor.detach().clone() for tensor in received_by(name, args)]
    return work, Exchange(name, dist.get_process_group_ranks(group), _option(args), sent, received)


def sent_by(name: str, args: Sequence[Any]) -> list[Tensor]:
    return [*internals.tree_leaves(args[_PLACES[name][1]])]


def received_by(name: str, args: Sequence[Any]) -> list[Tensor]:
    return [*internals.tree_leaves(args[_PLACES[name][0]])]


def _option(args: Sequence[Any]) -> str:
    options = args[-1]
    if hasattr(options, "reduceOp"):
        known = [name for name in _REDUCTIONS if options.reduceOp == getattr(dist.ReduceOp, name)]
        return known[0] if known else ""
    return str(getattr(options, "rootRank", ""))


class Done:
    """The handle of a collective that has ended."""

    def wait(self, *args: Any) -> bool:
        return True


def problem(exchanges: Sequence[Exchange]) -> str:
    """What is wrong with what the ranks of a group received, given what they sent; an empty text if nothing is.

    Sums must lie within the bound of `ExactMean`. What is only moved must be the same bit for bit.
    """
    first = exchanges[0]
    if len({(its.name, its.option) for its in exchanges}) > 1:
        return "is not the same collective on all ranks"
    if first.name == "alltoall_base":
        return ""  # its parts may have any sizes; what is sent is compared
    if first.name == "allreduce" or first.name.endswith(("reduce_scatter", "reduce_scatter_base")):
        return _problem_of_sums(exchanges)
    received = [_flat(its.received) for its in exchanges]
    if "allgather" in first.name:
        expected = [torch.cat([_flat(its.sent) for its in exchanges])] * len(exchanges)
    elif first.name == "alltoall":
        expected = [_flat(parts) for parts in zip(*(its.sent for its in exchanges), strict=True)]
    else:
        root = exchanges[int(first.option)]
        if first.name == "gather":
            received, expected = [_flat(root.received)], [torch.cat([_flat(its.sent) for its in exchanges])]
        elif first.name == "scatter":
            expected = [tensor.reshape(-1) for tensor in root.sent]
        else:  # broadcast
            expected = [_flat(root.sent)] * len(exchanges)
    same = all(_same(its, mine) for its, mine in zip(received, expected, strict=True))
    return "" if same else "has given other values than were sent"


def _problem_of_sums(exchanges: Sequence[Exchange]) -> str:
    first = exchanges[0]
    sent = [_flat(its.sent) for its in exchanges]
    parts = [sent]
    if first.name != "allreduce":
        parts = [list(chunks) for chunks in zip(*(its.chunk(len(exchanges)) for its in sent), strict=True)]
    elif any(not _same(_flat(its.received), _flat(first.received)) for its in exchanges):
        return "has given ranks different values"
    results = [_flat(its.received) for its in exchanges]
    found = [_problem_of_sum(its, result, first.option) for its, result in zip(parts, results, strict=False)]
    return next(filter(None, found), "")


def _problem_of_sum(sent: Sequence[Tensor], result: Tensor, reduction: str) -> str:
    stacked = torch.stack([*sent])
    if reduction in ("SUM", "AVG") and result.is_floating_point():
        mean = ExactMean(len(sent))
        for its in sent:
            mean.add({"": its})
        share = mean.share("", result, is_sum=reduction == "SUM")
        return "" if share <= 1 else f"has given another sum than of what was sent: {share:.3g} times the bound away"
    exact = {"SUM": stacked.sum(0), "MAX": stacked.amax(0), "MIN": stacked.amin(0)}
    return "" if reduction not in exact or torch.equal(exact[reduction], result) else "has given another result"


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def _same(one: Tensor, other: Tensor) -> bool:
    return digest(one).bits == digest(other).bits
