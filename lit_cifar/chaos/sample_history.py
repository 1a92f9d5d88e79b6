"""The samples that a job has trained on in effect, from the lines of its journal: pure functions.

A job that is killed runs some steps again. Of every optimizer step only the last run counts: earlier ones came after
the checkpoint from which the job resumed, and were lost with the process.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# Which start of the processes: how often the job was launched, how often torchrun restarted it since.
Start: TypeAlias = tuple[int, int]
StepKey: TypeAlias = tuple[int, int]  # epoch and optimizer step
Batches: TypeAlias = dict[StepKey, list[int]]  # the ids of the global batch of every step, by data-parallel rank


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """One loader step of one process, once the process has finished it."""

    start: Start
    rank: int
    dp_rank: int  # which part of each batch it reads; several processes may read the same
    epoch: int  # from 0
    step: int  # optimizer step, from 0 at the start of the whole training
    ids: tuple[int, ...]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "LoggedStep":
        launch, restart = content["start"]
        return cls(**{**content, "start": (launch, restart), "ids": tuple(content["ids"])})


@dataclass
class Audit:
    """What is wrong with the samples of a whole training, and what it cost to get there."""

    missing: int = 0  # samples of an epoch that no step counts
    doubled: int = 0  # samples that an epoch counts too often, or that are not in the data set
    moved: int = 0  # steps whose samples are not those of the same step of the uninterrupted run
    repeated: int = 0  # runs of an optimizer step that did not count
    problems: list[str] = field(default_factory=list)  # in words, the first step first


def effective(lines: Iterable[LoggedStep]) -> tuple[Batches, list[str]]:
    """The global batch of every step as it was last run, and where processes disagree that must read the same."""
    newest: dict[StepKey, Start] = {}
    read: dict[tuple[StepKey, Start], dict[int, dict[int, list[int]]]] = {}
    for line in lines:
        key = (line.epoch, line.step)
        newest[key] = max(newest.get(key, line.start), line.start)
        by_rank = read.setdefault((key, line.start), {}).setdefault(line.dp_rank, {})
        by_rank.setdefault(line.rank, []).extend(line.ids)
    batches: Batches = {}
    problems = []
    for key, start in sorted(newest.items()):
        batches[key] = []
        for dp_rank, by_rank in sorted(read[key, start].items()):
            first, *others = by_rank.values()
            batches[key] += first
            if any(ids != first for ids in others):
                problems.append(f"{_words(key)}: the processes of data-parallel rank {dp_rank} read different samples")
    return batches, problems


def num_repeated(lines: Iterable[LoggedStep]) -> int:
    """Runs of an optimizer step beyond the one that counts."""
    starts: dict[StepKey, set[Start]] = {}
    for line in lines:
        starts.setdefault((line.epoch, line.step), set()).add(line.start)
    return sum(len(found) - 1 for found in starts.values())


def audit(lines: Iterable[LoggedStep], *, undisturbed: Mapping[StepKey, Iterable[int]]) -> Audit:
    """Compare a job's effective history with that of the uninterrupted run, step by step and epoch by epoch."""
    lines = list(lines)
    batches, problems = effective(lines)
    result = Audit(repeated=num_repeated(lines), problems=problems)
    wanted = {key: Counter(ids) for key, ids in undisturbed.items()}
    for key in sorted(batches.keys() | wanted.keys()):
        if Counter(batches.get(key, ())) != wanted.get(key, Counter()):
            result.moved += 1
            what = "other samples than in the uninterrupted run" if key in wanted else "is not in the uninterrupted run"
            result.problems.append(f"{_words(key)}: {what if key in batches else 'was never run'}")
    for epoch in sorted({epoch for epoch, _ in batches.keys() | wanted.keys()}):
        _count_epoch(result, epoch, batches, undisturbed)
    return result


def _count_epoch(
    result: Audit, epoch: int, batches: Mapping[StepKey, Iterable[int]], undisturbed: Mapping[StepKey, Iterable[int]]
) -> None:
    """Add to `result` what an epoch counts too seldom or too often."""
    seen, every = (
        Counter(i for (of_step, _), ids in steps.items() if of_step == epoch for i in ids)
        for steps in (batches, undisturbed)
    )
    missing, doubled = sorted((every - seen).elements()), sorted((seen - every).elements())
    result.missing += len(missing)
    result.doubled += len(doubled)
    for ids, what in ((missing, "are missing"), (doubled, "are unknown or counted too often")):
        if ids:
            result.problems.append(f"epoch {epoch}: {len(ids)} samples {what}, e.g. {ids[0]}")


def _words(key: StepKey) -> str:
    return f"epoch {key[0]}, step {key[1]}"
