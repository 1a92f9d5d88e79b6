"""Whether the processes of a run have read each sample once, and hold what their peers hold."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lit_cifar.checkpoint.atomic import LAST
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.checks.compare import disagreement
from lit_cifar.tools.verify.record import Record, first_of
from lit_cifar.tools.verify.recorder import WHOLE_NETWORK, Snapshot, short_digest


def sample_problems(record: Record, reference: Record) -> list[str]:
    """Steps and evaluations that did not use each sample of the reference once."""
    problems, samples, wanted = [], _samples(record), _samples(reference)
    for when in wanted | samples:
        mine, ranks = samples.get(when, {}), wanted.get(when, {})
        unlike = [rank for rank, readers in mine.items() if any(ids != readers[0] for ids in readers)]
        problems += [f"{when}: the processes of data-parallel rank {rank} read different samples" for rank in unlike]
        expected = [i for readers in ranks.values() for i in readers[0]]
        found = unequal_samples([readers[0] for readers in mine.values()], expected)
        problems += [f"{when}: {problem}" for problem in found]
    return problems


def _samples(record: Record) -> dict[str, dict[int, list[list[int]]]]:
    """Ids by moment, such as "step 1", and data-parallel rank: a list for each process."""
    found: dict[str, dict[int, list[list[int]]]] = {}
    for number in record.steps:
        for process in record.processes(number):
            found.setdefault(f"step {number}", {}).setdefault(process["data_parallel_rank"], []).append(process["ids"])
        for each in record.evaluated(number).values():
            when = f"evaluation after step {number}"
            found.setdefault(when, {}).setdefault(each.data_parallel_rank, []).append(each.ids.tolist())
    return found


def unequal_samples(found: Sequence[Sequence[int]], expected: Sequence[int]) -> list[str]:
    """Phrases for the ids that are missing, seen too often or foreign, of those that the processes of a step read.

    `found` holds the ids of every data-parallel rank, `expected` those of the reference, in any order.
    """
    seen, wanted = Counter(i for of_rank in found for i in of_rank), Counter(expected)
    apart = {"missing": wanted - seen, "unknown or used too often": seen - wanted}
    return [f"{ids.total()} samples are {how}, e.g. {min(ids)}" for how, ids in apart.items() if ids]


def own_problems(record: Record) -> list[str]:
    """Values of a process that differ from those of its peers, its own earlier ones, or the checkpoint's."""
    last = record.checkpoints.get(LAST)
    saved = {} if last is None else read_checkpoint(last)["state_dict"]
    return [*peer_problems(record.snapshots), *change_problems(record.snapshots, saved)]


def peer_problems(snapshots: Sequence[Snapshot]) -> list[str]:
    """The first difference, at each moment, between processes that must hold the same."""
    holders: dict[str, dict[tuple[str, str], dict[int, str]]] = {}
    for peer in snapshots:
        held = holders.setdefault(peer.when, {})
        for name, (part, digest) in peer.state.items():
            held.setdefault((name, part), {})[peer.rank] = digest
    problems = []
    for when, held in holders.items():
        found = (disagreement(name, of_ranks) for (name, _), of_ranks in held.items())
        problems += first_of([f"{when}: {each}" for each in found if each])
    return problems


def change_problems(snapshots: Sequence[Snapshot], saved: Mapping[str, Any]) -> list[str]:
    """The first change, for each process and moment, since an earlier moment that must be the same.

    The whole network in the end must be that of the checkpoint, whose "state_dict" is `saved`, if there is one.
    """
    by_moment = {(snapshot.rank, snapshot.when): snapshot.state for snapshot in snapshots}
    digests = {name: short_digest(value) for name, value in saved.items()}
    found = []
    for now in snapshots:
        before, source = by_moment.get((now.rank, now.same_as or ""), {}), f"that of {now.same_as}"
        if saved and now.when == WHOLE_NETWORK:
            before = {name: ("", digests.get(name.rpartition(" (")[0], "")) for name in now.state}
            source = "the checkpoint's"
        changed = [name for name, (_, digest) in now.state.items() if name in before and digest != before[name][1]]
        found += first_of([f"{now.when}: {name} of process {now.rank} is not {source}" for name in changed])
    return found
