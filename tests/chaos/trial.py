"""One training under faults: waits for the moment of each, injects it, and sees whether the job resumes."""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path

import psutil
from processes import is_running, wait_until

from chaos.audit import LoggedStep, read_log
from chaos.faults import Aim, Fault, Kind
from chaos.job import Job

_LIMIT_S = 200.0  # longest wait for what the job is expected to do
# A fault comes within so many seconds after the beginning of its aim.
_SPREAD_S: dict[Aim, float] = {"step": 0.1, "save": 0.03, "start": 4.0}
_SIGNALS: dict[Kind, signal.Signals] = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


@dataclass
class Trial:
    job: Job  # a job that is not yet started
    sizes: Mapping[int, Sequence[str]]  # flags by number of processes; a resized job goes through them in turns
    lines: list[LoggedStep] = field(default_factory=list)

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
        before, pids = self._newest, {process.pid for process in self.job.ranks().values()}
        self._await_moment(fault)
        self._inject(fault)
        if fault.aim == "start":  # once more, while the processes import, meet, and load their checkpoint
            process = self._process(fault.rank, but=pids)
            time.sleep(fault.moment * _SPREAD_S["start"])
            _send(process, signal.SIGKILL)
        self._await(lambda: self._newest > before, f"the job is not back after: {fault}")
        last = max(line.step for line in self.lines if line.start == before)  # steps that ended after the signal too
        resumed = min(line.step for line in self.lines if line.start == self._newest)
        repeated = last + 1 - resumed
        assert repeated <= fault.most_repeated, f"{repeated} steps had to be repeated after: {fault}"

    def _await_moment(self, fault: Fault) -> None:
        if fault.aim == "save":
            old = self._unfinished_files()

            def one_begins() -> bool:
                now = self._unfinished_files()
                old.intersection_update(now)  # a draft that is gone may come again with the same name
                return bool(now - old)

            self._await(one_begins, "no checkpoint is being saved")
        if fault.aim != "start":
            time.sleep(fault.moment * _SPREAD_S[fault.aim])

    def _inject(self, fault: Fault) -> None:
        if fault.kind == "resize":
            self.job.terminate()
            self._resize()
        elif fault.kind == "truncate":
            hit = [*self.job.ranks().values()]
            for process in hit:
                _send(process, signal.SIGKILL)
            assert wait_until(
                lambda: not any(map(is_running, hit)), limit_s=60
            )  # one that dies may still rename a file
            newest = self._checkpoints / "last.ckpt"
            os.truncate(newest, int(fault.moment * newest.stat().st_size))
        else:
            _send(self._process(fault.rank), _SIGNALS[fault.kind])

    def _process(self, rank: int, *, but: Collection[int] = ()) -> psutil.Process:
        """The process of `rank`, once there is one whose pid is not among `but`."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = (process for of, process in self.job.ranks().items() if of == rank and process.pid not in but)
            return bool(found)

        self._await(is_there, f"there is no rank {rank}")
        return found[0]

    def _resize(self) -> None:
        self._size = next(self._turns)
        self._start()

    def _start(self) -> None:
        self.job.start(self.sizes[self._size], num_ranks=self._size)

    @property
    def _checkpoints(self) -> Path:
        return self.job.folder / "run" / "checkpoints"

    def _unfinished_files(self) -> set[str]:
        return {path.name for path in self._checkpoints.glob("*.part")}

    @property
    def _newest(self) -> tuple[int, int]:
        return max((line.start for line in self.lines), default=(0, 0))

    def _has_done(self, step: int) -> bool:
        return any(line.start == self._newest and line.step >= step - 1 for line in self.lines)

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Watch the job until the condition holds, and start it again whenever its launcher has given up."""

        def holds() -> bool:
            status = self.job.status
            self.lines = read_log(self.job.folder / "sample_log")
            if condition():
                return True
            assert status != 0, f"the training has ended, and {otherwise}"
            if status is not None:
                self._start()
            return False

        in_time = wait_until(holds, limit_s=_LIMIT_S, poll_s=0.02)
        assert in_time, f"{otherwise} within {_LIMIT_S:.0f} s; {self.job.last_words()}"


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
