"""The steps of a visit, most valuable first."""

from collections.abc import Callable
from dataclasses import dataclass

from gpu_visit.step import Step
from gpu_visit.steps import bits, first, float64, precisions, saving, speed, suite, waits


@dataclass(frozen=True)
class Plan:
    """A step to take.

    Attributes:
        title: In words.
        take: Does it, and notes what it finds.
        limit_s: After which it ends, whatever is left of it.
        round: Steps of one round run at the same time, where there are cores for several.
    """

    title: str
    take: Callable[[Step], None]
    limit_s: float
    round: int


PLANS = (
    Plan("import, versions, modes, first fit", first.take, limit_s=100, round=1),
    Plan("no host waits between log points", waits.take, limit_s=120, round=2),
    Plan("tests in one process", suite.take_fast, limit_s=120, round=2),
    Plan("float64: CPU against device", float64.take_one_process, limit_s=150, round=2),
    Plan("float64: two gloo ranks on one device", float64.take_two_ranks, limit_s=120, round=3),
    Plan("mixed precision in every mode", precisions.take, limit_s=120, round=3),
    Plan("save, load, resume, SIGTERM", saving.take, limit_s=120, round=3),
    Plan("the same bits with virtual replicas", bits.take, limit_s=120, round=3),
    Plan("throughput, and where the time goes", speed.take, limit_s=240, round=4),
    Plan("tests that start processes", suite.take_slow, limit_s=150, round=5),
)
