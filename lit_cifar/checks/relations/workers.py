"""Epochs are shuffled anew; workers of a data loader draw random numbers of their own, and read each sample once."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from lit_cifar.checks.relations import remarks
from lit_cifar.checks.relations.batches import sample_digests
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import NotJudgedError, Runs, unused
from lit_cifar.checks.verdict import Verdict

_PROBES = 32  # how often a sample is asked for
_BY_CHANCE = 1e-4  # changes that are seldom may agree with a higher probability: they are not judged
_MOST_SAMPLES = 2000  # of a stream that are read
_FEW = 4  # samples, whose order may be the same by chance
READ_AGAIN = "read again"  # asks a run to read its loaders of training once more, without workers and with two
Draws: TypeAlias = list[list[int]]  # in each of two epochs, digests of one sample that is asked for again and again


@dataclass
class Order:
    """The order of an epoch."""

    dataset: int | None  # its number
    length: int  # number of all samples
    is_drawn: bool  # by torch's own samplers
    begun: int  # steps before it
    places: list[int] = field(default_factory=list)  # those of the samples that were read


@dataclass
class Read:
    """What a process writes down of its loaders of training."""

    orders: list[Order] = field(default_factory=list)  # of all epochs
    # Without workers and with two.
    streams: list[tuple[Counter[int], Counter[int]]] = field(default_factory=list)  # how often each sample was read
    samples: list[tuple[Draws, Draws]] = field(default_factory=list)


def epochs(runs: Runs) -> Iterator[Verdict]:
    script = runs.own().script
    ranks = min(2, max(script.ranks, runs.plan.ranks))
    knobs = (("epochs", 2),) if script.knobs.get("epochs", 2) < 2 else ()
    yield from same_orders(runs.own(ranks=ranks, knobs=knobs))


def same_orders(trace: Trace) -> Iterator[Verdict]:
    """A verdict for what a run has shuffled in two epochs or more."""
    alike: dict[tuple[int | None, int, bool], list[Order]] = {}
    for order in trace.part(Read).orders:
        alike.setdefault((order.dataset, order.length, order.is_drawn), []).append(order)
    # Loaders that are read beside each other may have one order.
    pairs = [(a.places, b.places) for orders in alike.values() for a, b in pairwise(orders) if a.begun < b.begun]
    shuffled = [(a, b) for a, b in pairs if min(len(a), len(b)) > _FEW and a != sorted(a)]
    again = sum(all(one == other for one, other in zip(a, b, strict=False)) for a, b in shuffled)
    remedy = "give each epoch another order, such as by the sampler's set_epoch"
    found = [f"{again} of {len(shuffled)} epochs have the order of the one before: {remedy}"] if again else []
    if shuffled:
        verdict = Verdict.by_findings("order of epochs", found, f"{len(shuffled) + 1} epochs")
        is_drawn = any(is_drawn for _, _, is_drawn in alike)
        yield unused(verdict, "" if is_drawn else "right if the order was chosen")


def workers(runs: Runs) -> Iterator[Verdict]:
    """Read the loaders of the training once more, without workers and with two."""
    trace = runs.own(asks=READ_AGAIN)
    read, found = trace.part(Read), list[str]()
    if not read.streams and not read.samples:
        raise NotJudgedError(remarks.NO_LOADER)
    for (first_alone, second_alone), (first, second) in read.samples:
        drawn, most = Counter(first_alone + second_alone), 2 * len(first_alone)
        if (sum(n * (n - 1) for n in drawn.values()) / most / (most - 1)) ** (most / 4) > _BY_CHANCE:
            continue  # no random changes, or too seldom
        if first == second and first_alone != second_alone:
            found.append("with two workers each epoch repeats the random changes of the one before")
        if first[0::2] == first[1::2] and first_alone[0::2] != first_alone[1::2]:
            found.append("two workers make the same random changes")
    for alone, two in read.streams:
        again = sum(two[sample] > max(1, alone[sample]) for sample in two)
        if again > len(two) / 2:
            remedy = "divide the stream by torch.utils.data.get_worker_info()"
            found.append(f"two workers read {again} of {len(two)} samples twice: {remedy}")
    looked_at = f"{len(read.streams) + len(read.samples)} loaders, without workers and with 2"
    verdict = Verdict.by_findings("workers", found, looked_at)
    yield unused(verdict, "" if trace.script.has_workers else "the script has no workers")


def read_with_workers(loader: Any, seen: Read) -> None:
    """Note what a loader gives without workers and with two."""
    own = {name: getattr(loader, name) for name in ("dataset", "collate_fn", "worker_init_fn")}
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size
        streams = [DataLoader(**own, num_workers=number, batch_size=size) for number in (0, 2)]
        batches = (islice(stream, max(2, _MOST_SAMPLES // (size or 1))) for stream in streams)
        alone, two = (Counter(value for batch in each for value in sample_digests(batch)) for each in batches)
        seen.streams.append((alone, two))
        return
    own |= {"batch_size": 1, "sampler": [0] * _PROBES}
    again = [DataLoader(**own), DataLoader(**own, num_workers=2, persistent_workers=loader.lives_on)]
    drawn, by_two = ([[hash(tuple(sample_digests(batch))) for batch in one] for _ in range(2)] for one in again)
    seen.samples.append((drawn, by_two))
