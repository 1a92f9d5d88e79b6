"""The faults that hit a job, and their times: a pure function of a seed, so that `chaos` can be repeated."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal, TypeAlias, TypeVar

import psutil

Kind = Literal["kill", "term", "stop", "node", "resize", "truncate", "disk"]
Aim = Literal["step", "save", "start"]
Planned: TypeAlias = tuple[Kind, Aim]
T = TypeVar("T")

EQUAL_SIZE: tuple[Planned, ...] = (
    ("kill", "step"),
    ("kill", "save"),
    ("term", "step"),
    ("stop", "step"),
    ("term", "save"),
    ("truncate", "step"),
    ("disk", "step"),
    ("kill", "start"),
)
NODE: Planned = ("node", "step")  # only if Ray starts the processes
RESIZED: tuple[Planned, ...] = (("resize", "step"), ("kill", "step"), ("resize", "step"), ("term", "save"))
_AIMS: dict[Aim, str] = {"step": "", "save": " during a save", "start": ", and once more as it starts again"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    number: int
    # "kill", "term" and "stop" send SIGKILL, SIGTERM or SIGSTOP to one rank; "node" kills its node of a Ray cluster;
    # "resize" stops the whole job and starts it with `size` processes; "truncate" kills every rank and cuts the newest
    # checkpoint short; "disk" leaves no room for the next checkpoint.
    kind: Kind
    # "step": during the optimizer step `step`; "save": while a checkpoint is being written, at `step` or later;
    # "start": during the step, and once more while the processes start again.
    aim: Aim
    step: int  # optimizer step at which the fault is due, from the start of the whole training
    rank: int | None  # the rank that it hits, among the processes that run then; None if it hits all
    size: int  # number of processes that run after it
    moment: float  # in [0, 1): position in the step, the save or the start; the share of a truncated file that is left

    def __str__(self) -> str:
        words = {
            "node": f"kill the node of rank {self.rank}",
            "resize": f"resize to {self.size}",
            "truncate": f"kill all, truncate the newest checkpoint to {self.moment:.0%}",
            "disk": "fill the disk",
        }
        return words.get(self.kind, f"SIG{self.kind.upper()} rank {self.rank}") + _AIMS[self.aim]


def shares(num_faults: int) -> tuple[int, int]:
    """The numbers of faults that hit a job that keeps its size, and one that is resized: three tenths.

    Only a job that keeps its size can end with the bits of the uninterrupted run, so it gets the larger part.
    """
    of_resized = max(1, round(0.3 * num_faults)) if num_faults > 1 else 0
    return num_faults - of_resized, of_resized


def schedule_faults(
    num_faults: int,
    *,
    seed: int,
    sizes: Sequence[int],
    first_step: int,
    last_step: int,
    full_disk: bool = True,
    nodes: bool = False,
    kills_alone: bool = False,
) -> list[Fault]:
    """Faults in the order in which they happen, each at a random step of an equal part of the training.

    Nothing happens before `first_step`, when there are two checkpoints, nor from `last_step` on. A job that keeps its
    size gets all kinds in a random order, then all in a new one. With several `sizes` it is resized first of all, and
    then every other time: it starts with the first of them and goes through them in turns.
    """
    rng = random.Random(seed)
    possible = [fault for fault in EQUAL_SIZE if full_disk or fault[0] != "disk"] + [NODE] * nodes
    if kills_alone:
        possible = [fault for fault in EQUAL_SIZE if fault[0] == "kill"]
    planned = cycle(RESIZED) if len(sizes) > 1 else _shuffled(possible, random.Random(seed))
    ranks = {size: _shuffled(range(size), rng) for size in sizes}  # all ranks are hit, rank 0 too
    faults, turn = [], 0
    for index, (kind, aim) in enumerate(islice(planned, num_faults)):
        low, high = (first_step + (last_step - first_step) * i // num_faults for i in (index, index + 1))
        hit = sizes[turn % len(sizes)]
        turn += kind == "resize"
        faults.append(
            Fault(
                number=index + 1,
                kind=kind,
                aim=aim,
                step=rng.randrange(low, high),
                rank=next(ranks[hit]) if kind in ("kill", "term", "stop", "node") else None,
                size=sizes[turn % len(sizes)],
                moment=rng.random(),
            )
        )
    return faults


def _shuffled(items: Sequence[T], rng: random.Random) -> Iterator[T]:
    """Repeat the items without end, shuffled again for each repetition."""
    while True:
        yield from rng.sample(items, len(items))


# A disk that takes no further checkpoint: a limit on the size of files, so that a save fails halfway.
LEAST_BYTES = 4 << 20  # a checkpoint must be larger, so that there is room for a log and not for it
_MAX_BYTES = 2 << 20


def fill_disk(processes: Sequence[psutil.Process]) -> None:
    """Let none of `processes` write a file as large as a checkpoint. Processes that are started later can."""
    for process in processes:
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (_MAX_BYTES, hard))
