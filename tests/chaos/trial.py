"""One training under faults: waits for the moment of each, injects it, and sees whether the job resumes."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import psutil
from processes import wait_until

from chaos.faults import Fault, Kind
from chaos.job import Job
from chaos.progress import DoneStep, read_log

_LIMIT_S = 200.0  # longest wait for what the job is expected to do
_SPREAD_S = 0.1  # a fault comes within so many seconds after the beginning of its step
_SIGNALS: dict[Kind, signal.Signals] = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


@dataclass
class Trial:
    job: Job  # a job that is not yet started
    sizes: Mapping[int, Sequence[str]]  # flags by number of processes; a resized job goes through them in turns
    lines: list[DoneStep] = field(default_factory=list)

    def run(self, faults: Sequence[Fault]) -> None:
        """Start at the first size, go through all faults, and wait for the end.

        Raises:
            AssertionError: The job did not resume, repeated too many steps, or did not end.
        """
        self._turns: Iterator[int] = cycle(self.sizes)
        self._resize()
        for fault in faults:
            self._await(partial(self._has_done, fault.step), f"step {fault.step} is not reached")
            self._go_through(fault)
        self._await(lambda: self.job.status == 0, "the training does not end")

    def _go_through(self, fault: Fault) -> None:
        before = self._newest
        time.sleep(fault.moment * _SPREAD_S)
        self._inject(fault)
        self._await(lambda: self._newest > before, f"the job is not back after: {fault}")
        last = max(line.step for line in self.lines if line.start == before)  # steps that ended after the signal too
        resumed = min(line.step for line in self.lines if line.start == self._newest)
        repeated = last + 1 - resumed
        assert repeated <= fault.most_repeated, f"{repeated} steps had to be repeated after: {fault}"

    def _inject(self, fault: Fault) -> None:
        if fault.kind == "resize":
            self.job.terminate()
            self._resize()
        else:
            found: dict[int, psutil.Process] = {}

            def is_there() -> bool:
                found.update(self.job.ranks())
                return fault.rank in found

            self._await(is_there, f"there is no rank {fault.rank}")
            with suppress(psutil.NoSuchProcess):
                found[fault.rank].send_signal(_SIGNALS[fault.kind])

    def _resize(self) -> None:
        self._size = next(self._turns)
        self._start()

    def _start(self) -> None:
        self.job.start(self.sizes[self._size], num_ranks=self._size)

    @property
    def _newest(self) -> tuple[int, int]:
        return max((line.start for line in self.lines), default=(0, 0))

    def _has_done(self, step: int) -> bool:
        return any(line.start == self._newest and line.step >= step - 1 for line in self.lines)

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Watch the job until the condition holds, and start it again whenever its launcher has given up."""

        def holds() -> bool:
            status = self.job.status
            self.lines = read_log(self.job.folder / "steps")
            if condition():
                return True
            assert status != 0, f"the training has ended, and {otherwise}"
            if status is not None:
                self._start()
            return False

        in_time = wait_until(holds, limit_s=_LIMIT_S, poll_s=0.02)
        assert in_time, f"{otherwise} within {_LIMIT_S:.0f} s; {self.job.last_words()}"
