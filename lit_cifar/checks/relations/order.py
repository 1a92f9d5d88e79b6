"""Samples that are shuffled come in another order in each epoch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import Runs, unused
from lit_cifar.checks.verdict import Verdict

_FEW = 4  # samples, whose order may be the same by chance


@dataclass
class Order:
    """The order of an epoch."""

    length: int  # number of all samples
    is_drawn: bool  # by torch's own samplers
    places: list[int] = field(default_factory=list)  # those of the samples that were read


@dataclass
class Orders:
    """What a process writes down."""

    seen: list[Order] = field(default_factory=list)


def epochs(runs: Runs) -> Iterator[Verdict]:
    ranks = min(2, max(runs.own().script.ranks, runs.plan.ranks))
    yield from same_orders(runs.run(ranks=ranks)[0])


def same_orders(trace: Trace) -> Iterator[Verdict]:
    """A verdict for what a run has shuffled in two epochs or more."""
    orders = trace.part(Orders).seen
    alike: dict[tuple[int, bool], list[list[int]]] = {}
    for order in orders:
        alike.setdefault((order.length, order.is_drawn), []).append(order.places)
    pairs = [(a, b) for places in alike.values() for a, b in pairwise(places) if min(len(a), len(b)) > _FEW]
    shuffled = [(a, b) for a, b in pairs if a != sorted(a)]
    if not shuffled:
        return
    again = sum(all(one == other for one, other in zip(a, b, strict=False)) for a, b in shuffled)
    remedy = "give each epoch another order, such as by the sampler's set_epoch"
    text = f"{again} of {len(shuffled)} epochs have the order of the one before: {remedy}" if again else ""
    verdict = Verdict("order of epochs", "fail" if again else "pass", text, f"{len(shuffled) + 1} epochs")
    yield unused(verdict, "" if any(order.is_drawn for order in orders) else "right if the order was chosen")
