"""One training under faults: waits for the moment of each, injects it, and sees whether the job resumes."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from lit_cifar.checkpoint.atomic import LAST, newest_valid
from lit_cifar.tools.chaos.audit import ProcessStart, SampleLogReader
from lit_cifar.tools.chaos.faults import Aim, Fault, Kind, fill_disk
from lit_cifar.tools.chaos.job import Job, is_alive, wait_until
from lit_cifar.tools.terminal import say

_STOP_LIMIT_S = 60.0
_LIMIT_S = 300.0  # longest wait for all else that the job is expected to do
# A fault comes within so many seconds after the beginning of its aim.
_SPREAD_S: dict[Aim, float] = {"step": 0.1, "save": 0.03, "start": 0.1}
_SIGNALS: dict[Kind, signal.Signals] = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
# Number of intervals between checkpoints that a job may repeat: none if it was asked to stop, because it saves first.
# Training continues while a checkpoint is being written, at most until the next one is due.
_REPEATED_SAVES: dict[Kind, int] = {"kill": 2, "node": 2, "stop": 2, "term": 0, "resize": 0, "truncate": 3, "disk": 2}


class TrialError(Exception):
    """The job did not resume, or did not stop; the message says which."""


@dataclass(kw_only=True)
class Event:
    fault: Fault
    at_s: float  # seconds since the trial's start
    step: int | None  # the newest optimizer step that a process had finished; None before the first
    pids: list[int] = field(default_factory=list)  # pids of the processes that were hit
    during_save: bool = False  # whether a checkpoint was half written at that moment
    resumed_step: int | None = None  # the first step that was run afterwards
    repeated: int = 0  # steps that were run again
    away_s: float | None = None  # seconds until a step was finished again


@dataclass
class Trial:
    job: Job  # a job that is not yet started
    reader: SampleLogReader  # reader of the job's log of samples
    checkpoints: Path
    every_n_steps: int  # optimizer steps between the job's saves
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _size: int = 1
    _begin: float = field(default_factory=time.monotonic)
    _start_s: float = 0.0  # the fewest seconds so far from a start to its first step

    def run(self, faults: Sequence[Fault], *, size: int) -> None:
        """Start with `size` processes, go through all faults, and wait for the end, or raise a `TrialError`."""
        self._size = size
        self.job.start(size)
        self._await(lambda: self.reader.newest is not None, "the first step is not reached")
        self._start_s = self._now
        for fault in faults:
            self._await(partial(self._is_running, fault.step), f"step {fault.step} is not reached")
            self._go_through(fault, len(faults))
        self._await(lambda: self.job.status == 0, "the training does not end")
        self.reader.refresh()

    # A fault: its moment, the fault itself, what must happen before the job can resume, and the resumed job.

    def _go_through(self, fault: Fault, total: int) -> None:
        before, offset = self.reader.newest, self.job.log_bytes
        during_save = self._await_moment(fault)
        self.reader.refresh()
        event = Event(fault=fault, at_s=self._now, step=self.reader.last_step(before), during_save=during_save)
        self.events.append(event)
        self._inject(event)
        say(f"{event.at_s:6.1f} s  step {event.step}: {fault} ({fault.number} of {total})")
        if fault.kind == "resize":
            self._size = fault.size
            self.job.start(fault.size)
        elif fault.kind == "disk":
            self._see_it_stop(event, offset)
        elif fault.aim == "start":
            self._kill_once_more(event)
            before = self.reader.newest
        self._await(lambda: self.reader.newest != before, f"the job is not back after: {fault}")
        self._note_return(event, before)

    def _await_moment(self, fault: Fault) -> bool:
        """Wait for the planned moment. Return whether a save is under way."""
        if fault.aim == "save":
            old = self._unfinished_files()

            def one_begins() -> bool:
                now = self._unfinished_files()
                old.intersection_update(now)  # a draft that is gone may come again with the same name
                return bool(now - old)

            self._await(one_begins, "no checkpoint is being saved")
        time.sleep(fault.moment * _SPREAD_S[fault.aim])
        return bool(self._unfinished_files())

    def _unfinished_files(self) -> set[str]:
        return {path.name for path in self.checkpoints.glob("*.part")}

    def _inject(self, event: Event) -> None:
        fault = event.fault
        hit = [] if fault.kind == "resize" else self._processes(fault.rank)
        event.pids, event.at_s = [process.pid for process in hit], self._now
        if fault.kind in _SIGNALS:
            _signal(hit, _SIGNALS[fault.kind])
        elif fault.kind == "truncate":
            _signal(hit, signal.SIGKILL)
            wait_until(lambda: _have_ended(hit), limit_s=_STOP_LIMIT_S)  # a dying process may still rename a file
            newest = self.checkpoints / LAST
            os.truncate(newest, int(fault.moment * newest.stat().st_size))
        elif fault.kind == "node":
            raylets = [psutil.Process(int(process.environ()["RAY_RAYLET_PID"])) for process in hit]
            event.pids = [raylet.pid for raylet in raylets]
            _signal(raylets, signal.SIGKILL)
        elif fault.kind == "disk":
            fill_disk(hit)
        elif not self.job.terminate(limit_s=_STOP_LIMIT_S):
            raise TrialError(f"the job still runs {_STOP_LIMIT_S:.0f} s after SIGTERM")

    def _processes(self, rank: int | None, *, but: Sequence[int] = ()) -> list[psutil.Process]:
        """The process of `rank`, or the processes of all ranks; waits for a pid that is not among `but`."""
        found: list[psutil.Process] = []

        def are_there() -> bool:
            found[:] = (p for of, p in self.job.ranks().items() if rank in (None, of) and p.pid not in but)
            return bool(found)

        self._await(are_there, f"there is no rank {rank}")
        return found

    def _see_it_stop(self, event: Event, offset: int) -> None:
        """Wait for the job to stop on a full disk: its save must fail, say so, and leave the old files."""
        hit = [process for process in self.job.ranks().values() if process.pid in event.pids]
        if not wait_until(lambda: _have_ended(hit), limit_s=_STOP_LIMIT_S):
            self.problems.append("the job continued although a checkpoint could not be saved")
            _signal(hit, signal.SIGKILL)
        if not wait_until(lambda: "could not be saved" in "".join(self.job.log_since(offset)), limit_s=10.0):
            self.problems.append("the job did not report that a checkpoint could not be saved")
        if newest_valid(self.checkpoints)[0] is None:
            self.problems.append("a full disk left no valid checkpoint")

    def _kill_once_more(self, event: Event) -> None:
        """Kill the same rank again while the processes import, meet, and load their checkpoint."""
        self._processes(event.fault.rank, but=event.pids)
        time.sleep(event.fault.moment * self._start_s)
        again = self._processes(event.fault.rank, but=event.pids)
        event.pids += [process.pid for process in again]
        _signal(again, signal.SIGKILL)
        self.reader.refresh()

    def _note_return(self, event: Event, before: ProcessStart | None) -> None:
        last = self.reader.last_step(before)  # steps that ended after the signal are included
        event.resumed_step = self.reader.first_step(self.reader.newest)
        assert event.resumed_step is not None
        event.away_s = self._now - event.at_s
        self._start_s = min(self._start_s, event.away_s)
        event.repeated = max(0, (-1 if last is None else last) + 1 - event.resumed_step)
        allowed = _REPEATED_SAVES[event.fault.kind] * self.every_n_steps
        if event.repeated > allowed:
            self.problems.append(
                f"{event.fault} at step {event.step}: {event.repeated} steps had to be repeated, {allowed} allowed"
            )
        say(f"{self._now:6.1f} s  step {event.resumed_step}: resumed, {event.repeated} steps repeated")

    # The job as it runs.

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _is_running(self, step: int) -> bool:
        last = self.reader.last_step(self.reader.newest)
        return last is not None and last >= step - 1

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Watch the job until the condition holds, and start it again whenever its launcher has given up."""

        def holds() -> bool:
            self.reader.refresh()
            if condition():
                return True
            if self.job.status == 0:
                raise TrialError(f"the training has ended, and {otherwise}")
            if self.job.status is not None:
                say(f"{self._now:6.1f} s  the launcher ended with {self.job.status}; it is started again")
                self.job.start(self._size)
            return False

        if not wait_until(holds, limit_s=_LIMIT_S):
            words = " | ".join(line.strip()[:200] for line in self.job.last_words())
            raise TrialError(f"{otherwise} within {_LIMIT_S:.0f} s; {words}")


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _have_ended(processes: Sequence[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))
