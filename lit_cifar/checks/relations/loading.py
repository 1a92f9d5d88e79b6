"""Epochs have orders of their own. Workers draw random numbers of their own, and read each sample once."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import NotJudgedError, Runs, Verdict, unused

NAME = "workers"
_FEW = 4  # samples, whose order may be the same by chance


def workers(runs: Runs) -> Iterator[Verdict]:
    trace = runs.run(probe_loaders=True)[0]
    if not trace.loaders:
        raise NotJudgedError("it reads no DataLoader of torch")
    found = [text for seen in trace.loaders for text in (_of_stream(seen) if seen["stream"] else _of_samples(seen))]
    looked_at = f"{len(trace.loaders)} loaders, without workers and with 2"
    verdict = Verdict(NAME, "fail" if found else "pass", "; ".join(found), looked_at, found)
    yield unused(verdict, "" if trace.has_workers else "the script has no workers")


def epochs(runs: Runs) -> Iterator[Verdict]:
    """Samples that are shuffled come in another order in each epoch."""
    own = runs.own()
    ranks = min(2, max(own.own_ranks, runs.plan.ranks))
    yield from same_orders(runs.run(ranks=ranks)[0])


def same_orders(trace: Trace) -> Iterator[Verdict]:
    """A verdict for what a run has shuffled in two epochs or more."""
    alike: dict[tuple[int, bool], list[list[int]]] = {}
    for length, is_drawn, order in trace.orders:
        alike.setdefault((length, is_drawn), []).append(order)
    pairs = [(a, b) for orders in alike.values() for a, b in pairwise(orders) if min(len(a), len(b)) > _FEW]
    shuffled = [(a, b) for a, b in pairs if a != sorted(a)]
    if not shuffled:
        return
    again = sum(all(one == other for one, other in zip(a, b, strict=False)) for a, b in shuffled)
    remedy = "give each epoch another order, such as by the sampler's set_epoch"
    text = f"{again} of {len(shuffled)} epochs have the order of the one before: {remedy}" if again else ""
    verdict = Verdict("order of epochs", "fail" if again else "pass", text, f"{len(shuffled) + 1} epochs")
    yield unused(verdict, "" if any(is_drawn for _, is_drawn, _ in trace.orders) else "right if the order was chosen")


def _of_samples(seen: dict[str, Any]) -> Iterator[str]:
    """What `loaders` has seen of one sample that was asked for again and again."""
    (first, second), (first_alone, second_alone) = seen["2"], seen["0"]
    if len({*first_alone, *second_alone}) == 1 == len({*first, *second}):
        return  # no random changes
    if first == second and first_alone != second_alone:
        yield "with two workers each epoch repeats the random changes of the one before"
    if first[0::2] == first[1::2] and first_alone[0::2] != first_alone[1::2]:
        yield "two workers make the same random changes"


def _of_stream(seen: dict[str, Any]) -> Iterator[str]:
    alone, two = seen["0"], seen["2"]
    again = sum(two[sample] > alone[sample] for sample in alone)
    if again > len(alone) / 2:
        remedy = "divide the stream by torch.utils.data.get_worker_info()"
        yield f"two workers read {again} of {len(alone)} samples twice: {remedy}"
