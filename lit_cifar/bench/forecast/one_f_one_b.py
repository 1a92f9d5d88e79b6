"""How long a batch takes through a pipeline under the schedule 1F1B, also where its processes share cores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lit_cifar.bench.forecast.overlap import BACKWARD


@dataclass(frozen=True)
class Pass:
    """What a stage does with a microbatch."""

    microbatch: int
    is_backward: bool


def order_of_passes(stage: int, *, num_stages: int, num_microbatches: int) -> list[Pass]:
    """Those of a stage: as many forward passes as stages follow, then forward and backward in turn.

    Source: Narayanan et al., Memory-efficient pipeline-parallel DNN training, 2021, PipeDream-Flush.
    """
    ahead = min(num_microbatches, num_stages - 1 - stage)
    order = [Pass(number, is_backward=False) for number in range(ahead)]
    for number in range(num_microbatches):
        if number + ahead < num_microbatches:
            order.append(Pass(number + ahead, is_backward=False))
        order.append(Pass(number, is_backward=True))
    return order


def seconds_of_flow(stages: Sequence[float], *, num_microbatches: int, slowdown: Callable[[int], float]) -> float:
    """Seconds until every stage has done all its passes.

    Args:
        stages: Seconds of forward and backward of a microbatch in each stage, with a core for each.
        num_microbatches: Of the batch.
        slowdown: How many times as long a stage takes while so many stages compute.
    """
    processes = [
        _Process(index, seconds, order_of_passes(index, num_stages=len(stages), num_microbatches=num_microbatches))
        for index, seconds in enumerate(stages)
    ]
    total = 0.0
    while any(process.has_work for process in processes):
        computing = [process for process in processes if process.may_compute(processes)]
        until_next = min(process.left_s for process in computing)
        total += until_next * slowdown(len(computing))
        for process in computing:
            process.compute(until_next)
    return total


@dataclass
class _Process:
    """A stage and how far it is."""

    index: int
    seconds: float  # of forward and backward
    order: list[Pass]
    done: set[Pass] = field(default_factory=set)
    spent_s: float = 0.0  # on the current pass

    @property
    def has_work(self) -> bool:
        return len(self.done) < len(self.order)

    @property
    def _current(self) -> Pass:
        return self.order[len(self.done)]

    @property
    def left_s(self) -> float:
        """Of the current pass."""
        return self.seconds * (BACKWARD if self._current.is_backward else 1 - BACKWARD) - self.spent_s

    def may_compute(self, processes: Sequence["_Process"]) -> bool:
        """Whether there is a pass left, and the neighbour has sent what it needs."""
        if not self.has_work:
            return False
        sender = self.index + (1 if self._current.is_backward else -1)
        return sender in (-1, len(processes)) or self._current in processes[sender].done

    def compute(self, seconds: float) -> None:
        """So long on the current pass."""
        if self.left_s <= seconds * (1 + 1e-9):
            self.done.add(self._current)
            self.spent_s = 0.0
        else:
            self.spent_s += seconds
