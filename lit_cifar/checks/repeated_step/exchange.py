"""Tensors that ranks send one another inside a step, such as for SyncBatchNorm and contrastive losses.

A recorder writes down the tensors that a rank has sent and received; in a replay it receives the same again. Gradients
that `DistributedDataParallel` averages are no part of it: they do not pass through Python.
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
from lit_cifar.checks.repeated_step.digests import Digest, digest
from lit_cifar.checks.repeated_step.reduction import ExactMean

# Methods of a process group, to which all functions of torch.distributed come down: the places of the arguments that
# are received and sent.
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
    group: list[int]  # ranks of the group
    option: str  # name of the reduction, or the place of the sender in the group
    sent: list[Tensor]
    received: list[Tensor]


_ONE_BY_ONE = ("send", "recv", "recv_anysource")

# A function of a collective's name, the real method, the process group and its arguments.
Handler: TypeAlias = Callable[..., Any]


@contextmanager
def intercepted(handler: Handler, rank: Callable[[], int] | None = None) -> Iterator[None]:
    """Let `handler` take each collective that Python code starts, however the code has imported it.

    With `rank`, this process has that rank in all groups inside of the context.
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
    """The process groups that this process has made or joined."""
    return [*internals.world.pg_map]


def can_be_replayed(name: str) -> bool:
    return name in _PLACES


def is_of_parts(name: str, tensors: Sequence[Any], outputs: Collection[Digest]) -> bool:
    """Whether parts of a model exchange data so: point to point, or by a broadcast of an output of a call."""
    if name != "broadcast":
        return name in _ONE_BY_ONE
    return any(tensor.numel() > 1 and digest(tensor) in outputs for tensor in internals.tree_leaves(tensors))


def completed(name: str, real: Any, group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Exchange]:
    """Run a collective to its end. Return its result and the tensors that it has moved."""
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
        return next((name for name in _REDUCTIONS if options.reduceOp == getattr(dist.ReduceOp, name)), "")
    return str(getattr(options, "rootRank", ""))


class Done:
    """The handle of a collective that has ended."""

    def wait(self, *args: Any) -> bool:
        return True


def problem(exchanges: Sequence[Exchange]) -> str:
    """The mistake in the tensors that a group's ranks received, given those that they sent, in words; "" for none.

    Sums must lie within the bound of `ExactMean`. Tensors that are only moved must be the same bit for bit.
    """
    first = exchanges[0]
    if len({(exchange.name, exchange.option) for exchange in exchanges}) > 1:
        return "is not the same collective on all ranks"
    if first.name == "alltoall_base":
        return ""  # parts may have any sizes; the sent tensors are compared
    if first.name == "allreduce" or first.name.endswith(("reduce_scatter", "reduce_scatter_base")):
        return _problem_of_sums(exchanges)
    received = [_flat(exchange.received) for exchange in exchanges]
    if "allgather" in first.name:
        expected = [torch.cat([_flat(exchange.sent) for exchange in exchanges])] * len(exchanges)
    elif first.name == "alltoall":
        expected = [_flat(parts) for parts in zip(*(exchange.sent for exchange in exchanges), strict=True)]
    else:
        root = exchanges[int(first.option)]
        if first.name == "gather":
            received, expected = [_flat(root.received)], [torch.cat([_flat(exchange.sent) for exchange in exchanges])]
        elif first.name == "scatter":
            expected = [tensor.reshape(-1) for tensor in root.sent]
        else:  # broadcast
            expected = [_flat(root.sent)] * len(exchanges)
    same = all(_same(got, mine) for got, mine in zip(received, expected, strict=True))
    return "" if same else "has given other values than were sent"


def _problem_of_sums(exchanges: Sequence[Exchange]) -> str:
    first = exchanges[0]
    sent = [_flat(exchange.sent) for exchange in exchanges]
    parts = [sent]
    if first.name != "allreduce":
        parts = [list(chunks) for chunks in zip(*(tensor.chunk(len(exchanges)) for tensor in sent), strict=True)]
    elif any(not _same(_flat(exchange.received), _flat(first.received)) for exchange in exchanges):
        return "has given ranks different values"
    results = [_flat(exchange.received) for exchange in exchanges]
    found = [_problem_of_sum(part, result, first.option) for part, result in zip(parts, results, strict=False)]
    return next(filter(None, found), "")


def _problem_of_sum(sent: Sequence[Tensor], result: Tensor, reduction: str) -> str:
    stacked = torch.stack([*sent])
    if reduction in ("SUM", "AVG") and result.is_floating_point():
        mean = ExactMean(len(sent))
        for tensor in sent:
            mean.add({"": tensor})
        share = mean.share("", result, is_sum=reduction == "SUM")
        return "" if share <= 1 else f"has given another sum than of what was sent: {share:.3g} times the bound away"
    exact = {"SUM": stacked.sum(0), "MAX": stacked.amax(0), "MIN": stacked.amin(0)}
    return "" if reduction not in exact or torch.equal(exact[reduction], result) else "has given another result"


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def _same(one: Tensor, other: Tensor) -> bool:
    return digest(one).bits == digest(other).bits
