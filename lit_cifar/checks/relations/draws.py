"""The random numbers that a training draws, noted for each step."""

import zlib
from typing import Any

from lit_cifar.checks.relations.generators import states
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.ranks import Drawn
from lit_cifar.checks.relations.remarks import IN_STEP


class Draws:
    """Follows the generators from where a step begins."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._before: tuple[Any, ...] | None = None  # states of generators
        self._samples: list[int] | None = None  # digests of those of the batch
        self._count = 0  # of draws for these samples

    def follow_batch(self, samples: list[int] | None) -> None:
        """From now on a batch is trained; its `samples` are given if draws should follow them."""
        self._before, self._samples, self._count = states(), samples, 0

    def follow_call(self) -> None:
        """From now on a module is trained, perhaps without a batch of a loader."""
        if self._before is None:
            self._before = states()

    def stop(self) -> None:
        self._before = self._samples = None

    def follow_step(self, *, is_in_batch: bool) -> None:
        """From now on the step after one of the optimizer is trained."""
        self._before = states() if is_in_batch else None

    def note(self) -> None:
        """Note whether numbers were drawn since the beginning."""
        used = [] if self._before is None else [a for a, b in zip(self._before, states(), strict=True) if a != b]
        if used:
            self._trace.remarks.add(IN_STEP)
            self._trace.part(Drawn).states.add(zlib.crc32(repr(used).encode()))

    def key(self) -> tuple[int, list[int]] | None:
        """What a random number for each sample of this batch follows from: the step, the draw, and the sample."""
        if self._samples is None:
            return None
        self._count += 1
        return hash((self._trace.steps, self._count)), self._samples
