"""One training step of all ranks on one clock: what each did when, and for how long of each kind.

Torch's profiler writes a Chrome trace for each process. Its times are those of the machine's clock, so the traces of
one machine's processes fit together.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Interval = tuple[float, float]  # start and end
Event = dict[str, Any]  # of a Chrome trace ("Trace Event Format", Google), with "ts" and "dur" in microseconds

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_MESSAGES = ("gloo:send", "gloo:recv")  # noted in the thread that asks for them; collectives have threads of their own


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Into what the time of a step divides; in milliseconds, and together the whole step."""

    compute: float  # alone
    overlapped: float  # compute while something is sent or received
    waiting: float  # something is sent or received, and nothing computed: the transfer, or until the others have come
    host: float  # neither: Python, fetching the batch, logging

    @property
    def step(self) -> float:
        return self.compute + self.overlapped + self.waiting + self.host

    @classmethod
    def of(cls, compute: Sequence[Interval], communication: Sequence[Interval], step_us: float) -> "Shares":
        """From intervals within the step, in microseconds."""
        computing, sending = length(union(compute)), length(union(communication))
        either = length(union([*compute, *communication]))
        shared = max(0.0, computing + sending - either)  # which rounding can make negative
        parts = (computing - shared, shared, sending - shared, step_us - either)
        return cls(**dict(zip(("compute", "overlapped", "waiting", "host"), (us / 1e3 for us in parts), strict=True)))


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """What a rank did in the step; times in microseconds since the first rank began its own."""

    rank: int
    start: float
    end: float
    events: list[Event]  # that began within; "pid" is the rank
    stages: list[Event]  # a stage's work on a microbatch, in modes that have stages

    @property
    def compute(self) -> list[Interval]:
        """When something was computed: kernels, or torch's operators where there are none.

        The operators with which a collective copies what it sends belong to the collective.
        """
        if self._on_gpu:
            return self._within(event for event in self._on_gpu if not _is_communication(event))
        senders = {event["tid"] for event in self.events if _is_communication(event) and event["name"] not in _MESSAGES}
        found = (event for event in self.events if event["name"].startswith("aten::") and event["tid"] not in senders)
        return self._within(found)

    @property
    def communication(self) -> list[Interval]:
        """When something was under way from or to other ranks or devices."""
        return self._within(event for event in self._on_gpu or self.events if _is_communication(event))

    @property
    def shares(self) -> Shares:
        return Shares.of(self.compute, self.communication, self.end - self.start)

    @property
    def _on_gpu(self) -> list[Event]:
        return [event for event in self.events if event.get("cat") in _ON_GPU]

    def _within(self, events: Iterable[Event]) -> list[Interval]:
        cut = ((event["ts"], min(event["ts"] + event["dur"], self.end)) for event in events)
        return union(cut)


def _is_communication(event: Event) -> bool:
    name = str(event["name"])
    between_gpus = event.get("cat") == "gpu_memcpy" and "PtoP" in name
    return name.startswith(("gloo:", "nccl")) or between_gpus


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    return sum(end - start for start, end in disjoint)


def both(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The points that are in both."""
    found = [(max(a, c), min(b, d)) for a, b in first for c, d in second if max(a, c) < min(b, d)]
    return union(found)


# Files ---------------------------------------------------------------------------------------------------------------


def read_ranks(folder: Path, *, step: str) -> list[RankStep]:
    """What the callback `StepTrace` has written; `step` is what it calls the step."""
    facts = sorted((json.loads(path.read_text()) for path in folder.glob("facts*.json")), key=lambda fact: fact["rank"])
    profiles = {fact["rank"]: json.loads((folder / f"profile{fact['rank']}.json").read_text()) for fact in facts}
    stages = {fact["rank"]: fact["stages"] for fact in facts}
    return merged(profiles, stages, step=step)


def merged(profiles: dict[int, Any], stages: dict[int, list[Event]], *, step: str) -> list[RankStep]:
    """The profiles of all ranks on one clock, which begins with the first rank's step.

    Args:
        profiles: Chrome traces by rank.
        stages: By rank, with the time of day as "ts".
        step: The name of the event that lasts as long as the step.
    """
    timed = {rank: [*_at_time_of_day(profile)] for rank, profile in profiles.items()}
    # A GPU has a copy of the event, from its first kernel to its last.
    steps = {
        rank: next(e for e in events if e["name"] == step and e.get("cat") == "user_annotation")
        for rank, events in timed.items()
    }
    origin = min(event["ts"] for event in steps.values())
    found = []
    for rank, own in steps.items():
        start, end = own["ts"], own["ts"] + own["dur"]
        events = [_moved(e, origin, rank) for e in timed[rank] if start <= e["ts"] < end and e.get("cat") != "Trace"]
        parts = [_moved(event, origin, rank) for event in stages.get(rank, [])]
        found.append(RankStep(rank=rank, start=start - origin, end=end - origin, events=events, stages=parts))
    return found


def _at_time_of_day(profile: Any) -> Iterator[Event]:
    base_us = profile.get("baseTimeNanoseconds", 0) / 1e3
    for event in profile["traceEvents"]:
        if event["ph"] == "X":
            yield event | {"ts": base_us + event["ts"]}


def _moved(event: Event, origin: float, rank: int) -> Event:
    return event | {"ts": event["ts"] - origin, "pid": rank}


def chrome_trace(ranks: Sequence[RankStep]) -> dict[str, Any]:
    """A process for each rank: its threads and GPU streams as the profiler saw them, and a row for each stage."""
    events: list[Event] = []
    for rank in ranks:
        events += [_name("process_name", rank.rank, f"rank {rank.rank}"), *_thread_names(rank)]
        events += rank.events
        for stage in rank.stages:
            row = f"stage {stage['args']['stage']}"
            events.append(stage | {"ph": "X", "cat": "stage", "tid": row})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _thread_names(rank: RankStep) -> Iterator[Event]:
    for thread in sorted({event["tid"] for event in rank.events}, key=str):
        own = [event for event in rank.events if event["tid"] == thread]
        if own[0].get("cat") in _ON_GPU or own[0].get("cat") == "gpu_user_annotation":
            words = "GPU stream"
        elif any(_is_communication(event) and event["name"] not in _MESSAGES for event in own):
            words = "collectives"
        else:
            words = "operators"
        yield _name("thread_name", rank.rank, words, thread)


def _name(kind: str, rank: int, name: str, thread: Any = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}
