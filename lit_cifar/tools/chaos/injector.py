"""One training under faults: waits for the moment of each, injects it, and sees whether the job resumes."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lit_cifar.checkpoint.files import LAST, newest_valid
from lit_cifar.tools.chaos.faults import Fault, Kind, fill_disk
from lit_cifar.tools.chaos.job import TorchrunJob, is_alive, wait_until
from lit_cifar.tools.chaos.sample_log import SampleLogReader, Start

Report = Callable[[str], None]

_STOP_LIMIT_S = 60.0
_LIMIT_S = 120.0  # of everything else that the job is expected to do
_MAX_LAUNCHES_IN_VAIN = 3

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
# How many intervals between checkpoints a job may have to repeat: none if it was asked to stop, as it saves first.
# Training continues while a checkpoint is being written, at most until the next one is due.
_REPEATED_SAVES: dict[Kind, int] = {"kill": 2, "stop": 2, "term": 0, "resize": 0, "truncate": 3, "disk": 2}


class TrialError(Exception):
    """The job did not resume, or did not stop; the message says which."""


@dataclass(kw_only=True)
class Event:
    """A fault as it happened."""

    fault: Fault
    at_s: float  # since the trial's start
    step: int | None  # the newest optimizer step that a process had finished; None before the first
    pids: list[int] = field(default_factory=list)  # of the processes that were hit
    during_save: bool = False  # whether a checkpoint was half written at that moment
    resumed_step: int | None = None  # the first step that was run afterwards
    repeated: int = 0  # steps that were run again
    away_s: float | None = None  # seconds until a step was finished again
    said: str | None = None  # what the job printed about it, if it must print something
    again_s: float | None = None  # if the rank was killed once more: seconds after that rank's start
    anew: bool | None = None  # whether a new Python was started for the restarted processes; else they were forked

    def __str__(self) -> str:
        if self.fault.aim == "save" and not self.during_save:
            return f"{self.fault}, which was quicker"
        return f"{self.fault}{' during a save' if self.during_save and self.fault.aim == 'step' else ''}"


@dataclass
class Trial:
    """A job, the log of its samples, and what happens to them."""

    job: TorchrunJob  # not yet started
    reader: SampleLogReader  # of the job's log of samples
    checkpoints: Path
    every_n_steps: int  # optimizer steps between two checkpoints
    start_s: float  # seconds that forked processes took to their first step, without faults
    report: Report  # called with a line whenever something happens
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _size: int = 1
    _begin: float = field(default_factory=time.monotonic)
    _launches_in_vain: int = 0
    _launched_step: int | None = None
    _start_s: dict[bool, float] = field(default_factory=dict)  # as `start_s`, of new Pythons and of forked processes

    def run(self, faults: Sequence[Fault], *, size: int) -> None:
        """Start with `size` processes, go through all faults, and wait for the end; else a `TrialError`."""
        self._size = size
        self.job.start(size)
        self._await(lambda: self.reader.newest is not None, "the first step is not reached")
        self._note_start()
        for fault in faults:
            self._await(partial(self._is_running, fault.step), f"step {fault.step} is not reached")
            self._go_through(fault, len(faults))
        self._await(lambda: self.job.status == 0, "the training does not end")
        self.reader.refresh()

    @property
    def num_planned_restarts(self) -> int:
        return sum(1 + (event.fault.aim == "start") for event in self.events)

    # A fault: its moment, the fault itself, what must happen before the job can resume, and the resumed job.

    def _go_through(self, fault: Fault, total: int) -> None:
        before, offset = self.reader.newest, self.job.log_bytes
        during_save = self._await_moment(fault)
        self.reader.refresh()
        event = Event(fault=fault, at_s=self._now, step=self._last_step(before), during_save=during_save)
        self.events.append(event)
        self._inject(event)
        self.report(f"{event.at_s:6.1f} s  step {event.step}: {event} ({fault.number} of {total})")
        if fault.kind == "resize":
            self._size = fault.size
            self.job.start(fault.size)
        elif fault.kind == "disk":
            self._see_it_stop(event, offset)
        elif fault.aim == "start":
            before = self._kill_once_more(event) or before
        self._await(lambda: self.reader.newest != before, f"the job is not back after: {fault}")
        self._note_return(event, before)

    def _await_moment(self, fault: Fault) -> bool:
        """Wait for the planned moment; whether it is one during a save."""
        if fault.aim == "save":
            old = self._unfinished_files()
            self._await(lambda: bool(self._unfinished_files() - old), "no checkpoint is being saved")
        time.sleep(fault.delay_s)
        return bool(self._unfinished_files())

    def _unfinished_files(self) -> set[str]:
        try:
            return {path.name for path in self.checkpoints.iterdir() if path.suffix != ".ckpt"}
        except OSError:
            return set()

    def _inject(self, event: Event) -> None:
        fault = event.fault
        hit = [] if fault.kind == "resize" else self._processes(fault.rank)
        event.pids = [process.pid for process in hit]
        if fault.kind in _SIGNALS:
            _signal(hit, _SIGNALS[fault.kind])
        elif fault.kind == "truncate":
            _signal(hit, signal.SIGKILL)
            wait_until(lambda: _have_ended(hit), limit_s=_STOP_LIMIT_S)  # who is half dead may still rename a file
            newest = self.checkpoints / LAST
            os.truncate(newest, int((fault.keep or 0.0) * newest.stat().st_size))
        elif fault.kind == "disk":
            fill_disk(hit)
        elif not self.job.terminate(limit_s=_STOP_LIMIT_S):
            raise TrialError(f"the job still runs {_STOP_LIMIT_S:.0f} s after SIGTERM")

    def _processes(self, rank: int | None) -> list[psutil.Process]:
        """The process of `rank`, or those of all ranks; waits if there is none at this moment."""
        found: dict[int, psutil.Process] = {}

        def is_there() -> bool:
            found.clear()
            found.update(self.job.ranks())
            return bool(found) if rank is None else rank in found

        self._await(is_there, f"there is no rank {rank}")
        return list(found.values()) if rank is None else [found[rank]]

    def _see_it_stop(self, event: Event, offset: int) -> None:
        """On a full disk: the next save must fail, say so, and leave what was there."""
        hit = [process for process in self.job.ranks().values() if process.pid in event.pids]
        if not wait_until(lambda: _have_ended(hit), limit_s=_STOP_LIMIT_S):
            self.problems.append("the job continued although a checkpoint could not be saved")
            _signal(hit, signal.SIGKILL)
        wait_until(lambda: bool(self._complaints(offset)), limit_s=1.0)
        event.said = next(iter(self._complaints(offset)), None)
        if event.said is None:
            self.problems.append("the job did not report that a checkpoint could not be saved")
        if newest_valid(self.checkpoints)[0] is None:
            self.problems.append("a full disk left no valid checkpoint")

    def _complaints(self, offset: int) -> list[str]:
        return [line.strip() for line in self.job.log_since(offset) if "could not be saved" in line]

    def _kill_once_more(self, event: Event) -> Start | None:
        """Kill the same rank again while the processes import, meet, and load their checkpoint."""
        fault = event.fault

        def is_new() -> bool:
            return any(rank == fault.rank and p.pid not in event.pids for rank, p in self.job.ranks().items())

        self._await(is_new, f"rank {fault.rank} is not started again")
        (worker,) = (worker for worker in self.job.newest if worker.rank == fault.rank)
        planned_s = (fault.part or 0.0) * self._start_s.get(worker.anew, self.start_s)
        time.sleep(max(0.0, worker.at_s + planned_s - time.monotonic()))
        hit = self._processes(fault.rank)
        event.again_s = time.monotonic() - worker.at_s
        event.pids += [process.pid for process in hit]
        _signal(hit, signal.SIGKILL)
        self.reader.refresh()
        return self.reader.newest

    def _note_return(self, event: Event, before: Start | None) -> None:
        newest, last = self.reader.newest, self._last_step(before)
        assert newest is not None
        event.resumed_step = self.reader.first_step(newest)
        assert event.resumed_step is not None
        event.away_s = self._now - event.at_s
        event.anew = self._note_start()
        event.repeated = max(0, (-1 if last is None else last) + 1 - event.resumed_step)
        allowed = _REPEATED_SAVES[event.fault.kind] * self.every_n_steps
        if event.repeated > allowed:
            self.problems.append(
                f"{event.fault} at step {event.step}: {event.repeated} steps had to be repeated, {allowed} allowed"
            )
        how = "new Python" if event.anew else "forked"
        self.report(f"{self._now:6.1f} s  step {event.resumed_step}: resumed, {event.repeated} steps repeated ({how})")

    def _note_start(self) -> bool:
        """Processes have just finished their first step; whether Python was started for them."""
        workers = [worker for worker in self.job.workers if worker.start == self.reader.newest]
        anew = workers[0].anew
        self._start_s[anew] = time.monotonic() - min(worker.at_s for worker in workers)
        return anew

    # The job as it runs.

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _last_step(self, start: Start | None) -> int | None:
        return None if start is None else self.reader.last_step(start)

    def _is_running(self, step: int) -> bool:
        last = self._last_step(self.reader.newest)
        return last is not None and last >= step - 1

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Watch the job until the condition holds, and start it again whenever torchrun has given up."""

        def holds() -> bool:
            self.reader.refresh()
            if condition():
                return True
            if self.job.status == 0:
                raise TrialError(f"the training has ended, and {otherwise}")
            if self.job.status is not None:
                self._launch_again()
            return False

        if not wait_until(holds, limit_s=_LIMIT_S):
            raise TrialError(f"{otherwise} within {_LIMIT_S:.0f} s; {self._last_words()}")

    def _launch_again(self) -> None:
        step = self._last_step(self.reader.newest)
        self._launches_in_vain = self._launches_in_vain + 1 if step == self._launched_step else 0
        self._launched_step = step
        if self._launches_in_vain >= _MAX_LAUNCHES_IN_VAIN:
            raise TrialError(f"the job fails again and again: {self._last_words()}")
        self.report(f"{self._now:6.1f} s  torchrun has ended with status {self.job.status}; it is started again")
        self.job.start(self._size)

    def _last_words(self) -> str:
        return " | ".join(line.strip()[:200] for line in self.job.last_words() or self.job.log_since(0)[-2:])


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _have_ended(processes: Sequence[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))
