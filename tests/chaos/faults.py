"""The faults that hit a training, and their moments: a pure function of a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EVERY_N_STEPS = 4  # optimizer steps between saves
_SPACING = 12  # optimizer steps between faults, more than are repeated after one

Kind = Literal["kill", "term", "stop", "resize"]

ALL: tuple[Kind, ...] = ("kill", "term", "stop", "kill", "term", "kill")


@dataclass(frozen=True, kw_only=True)
class Fault:
    # "kill", "term" and "stop" send SIGKILL, SIGTERM or SIGSTOP to one rank; "resize" stops the whole job and starts it
    # with the next number of processes.
    kind: Kind
    step: int  # optimizer step during which it comes, from the start of the whole training
    rank: int
    moment: float  # in [0, 1): position in the step

    @property
    def most_repeated(self) -> int:
        """Number of steps that may be repeated: none by a job that was asked to stop, because it saves first.

        Training continues while a checkpoint is being written, at most until the next one is due.
        """
        saves: dict[Kind, int] = {"kill": 2, "stop": 2, "term": 0, "resize": 0}
        return saves[self.kind] * EVERY_N_STEPS


def num_steps(num_faults: int) -> int:
    """Length of a training with so many faults."""
    return 2 * EVERY_N_STEPS + _SPACING * (num_faults + 1)


def drawn(planned: Sequence[Kind], *, seed: int, num_ranks: int) -> list[Fault]:
    """Faults in this order, after the second checkpoint: each at a random step of an equal part of the training."""
    rng = random.Random(seed)
    first = 2 * EVERY_N_STEPS + 2
    return [
        Fault(
            kind=kind,
            step=first + _SPACING * index + rng.randrange(_SPACING),
            rank=rng.randrange(num_ranks),
            moment=rng.random(),
        )
        for index, kind in enumerate(planned)
    ]
