"""The watchdog's thread: it writes heartbeats, judges those that it reads, and ends its process."""

import atexit
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist
from lightning.pytorch import Trainer

from lit_cifar import internals
from lit_cifar.checks.watchdog.activity import Activity, PhaseTimer
from lit_cifar.checks.watchdog.diagnosis import (
    JUDGE,
    NOTICE_S,
    SILENT_AFTER_FAILURE_S,
    Patience,
    Peer,
    Verdict,
    diagnose,
    diagnose_judge,
    notice,
    notice_of_judge,
    unanswered,
    updated,
)
from lit_cifar.checks.watchdog.heartbeat import Heartbeat, Mates, Sight
from lit_cifar.checks.watchdog.stacks import Stack, place_in_worker, stack_of
from lit_cifar.checks.watchdog.store import HeartbeatStore, News, SilenceClock, meet
from lit_cifar.errors import printable
from lit_cifar.launch.signals import EXIT_STOPPED, flush_streams, hear_signals, newest_request
from lit_cifar.launch.startup import kill_workers

BEAT_S = 1.0
# Time for the main thread to end by its own exception, which closes loggers and files.
GRACE_S = 4.0
_STATES = ("unseen", "running", "stopped", "gone")  # states of one process, in the order in which they may be seen
# Seconds that the judge, when it has finished, waits for others that have not, and any other rank for one answer.
_FAREWELL_S = 10.0


def start_monitor(trainer: Trainer, *, timeout_s: float, hang_timeout_s: float) -> "Monitor":
    """The monitor of this process, once all processes of the run are here."""
    rank = trainer.global_rank
    board, everyone = meet(rank, trainer.world_size)
    device = trainer.strategy.root_device
    # The limit of torch, less what may pass from the last heartbeat to the moment when NCCL aborts the process.
    limit = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]  # nothing public tells it
    watch = Monitor(
        everyone,
        rank=rank,
        board=board,
        patience=Patience(timeout_s, hang_timeout_s, limit.total_seconds() - 2 * BEAT_S),
        on_gpu=device.type == "cuda",
        store_host=None if multiprocessing.parent_process() else JUDGE,  # a spawned process uses its parent's
    )
    _come_before_observer(watch)
    hear_signals()
    watch.start()
    return watch


def _come_before_observer(watch: "Monitor") -> None:
    """Suspend Lightning's observer of the processes that it has launched while the watchdog is active.

    The observer looks every five seconds for a failed process and kills all others before they can report anything.
    """
    for thread in threading.enumerate():
        if isinstance(thread, internals.ChildProcessObserver):
            thread._run = lambda observer=thread: not watch.is_alive() and type(observer)._run(observer)


def _say(message: str) -> None:
    """Print `message` on stderr, if that is usable in a program that is not ours."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"{printable(message, lines=True)}\n")
        sys.stderr.flush()


class Monitor(threading.Thread):
    """Watches all processes of a run, in a thread of one of them; in all but the judge's it watches the judge.

    One process reports a verdict, see `diagnose`, on stderr. Then each ends: by an exception of its main thread, which
    a broken connection raises in most, or after `grace_s` without one.

    A process is judged by whether its heartbeat has changed between two reads, in the time of a `SilenceClock`: a slow
    store is not silence. When it owes one answer for as long the rank that serves it (`store_host`) is silent.
    """

    def __init__(
        self,
        everyone: Sequence[Heartbeat],
        *,
        rank: int,
        board: HeartbeatStore,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
        on_gpu: bool = False,
        store_host: int | None = None,
        grace_s: float = GRACE_S,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.verdict: Verdict | None = None
        self._own = everyone[rank]
        self.mates = Mates(everyone, self._own)
        self._is_judge = rank == JUDGE
        self._board = board
        self.progress = PhaseTimer(clock=clock)
        self._patience = patience
        self._store_host = store_host
        self._grace_s = grace_s
        self._end = end
        self._main_thread = threading.main_thread().ident or 0
        peers = {beat.pid for beat in everyone if beat.host == self._own.host}
        self._activity = Activity(peers=peers, memory_s=patience.silent_s / 2, on_gpu=on_gpu, clock=clock)
        self._failure = ""
        self._quiet = False
        self._over = self._told = False
        self._number = self._asked = 0
        self._stack, self._worker = Stack(), ""
        self._look_after_s = min(patience.silent_s, NOTICE_S) / 2  # seconds without progress or heartbeat
        self._noticed: set[tuple[int, int]] = set()  # ranks, and their phases, that have been named as late
        self._wake, self._closed, self._concluded = threading.Event(), threading.Event(), threading.Event()
        self._silence = SilenceClock(clock)
        visible = self.mates.look()
        self._peers = {
            beat.rank: Peer(beat=beat, heard_at=0.0, sight=visible.get(beat.rank, Sight("unseen")))
            for beat in everyone
            if self._is_judge or beat.rank in {JUDGE, rank, *visible}
        }

    # The main thread calls these.

    def fail(self, failure: str, *, quiet: bool = False) -> Verdict | None:
        """Report that the main thread has failed, with the end of its traceback, and return the verdict.

        If it is `quiet` the main thread prints the message itself.
        """
        self._failure, self._quiet = failure, quiet
        self._wake.set()
        self._concluded.wait(SILENT_AFTER_FAILURE_S + 4 * BEAT_S)
        return self.verdict

    def leave(self) -> None:
        """Report that this process has finished, and stop watching the others."""
        self._over = True
        self._wake.set()
        self.join(3 * _FAREWELL_S)
        atexit.unregister(self._close)

    # The thread runs these.

    def run(self) -> None:
        """Write and diagnose heartbeats until there is a verdict or the run has ended."""
        # An interpreter that shuts down must not have a thread in torch's C++: that ends in SIGABRT.
        atexit.register(self._close)
        verdict = self._watch()
        self._board.close()
        self.mates.close()
        if verdict is not None:
            self._conclude(verdict)

    def _watch(self) -> Verdict | None:
        farewell_at = 0.0
        while not self._closed.is_set():
            verdict = self._tick()
            if verdict is not None:
                return verdict
            if self._over:
                farewell_at = farewell_at or time.monotonic()
                if self._may_leave(time.monotonic() - farewell_at):
                    return None
            self._wake.wait(BEAT_S / 10 if self._over else BEAT_S)
            self._wake.clear()
        return None

    def _may_leave(self, after_s: float) -> bool:
        """Whether all know that this process has finished, or will not learn it any more."""
        if self._is_judge and after_s > _FAREWELL_S:
            return True
        if not self._told:  # otherwise the others would report this process as killed
            return self._board.lost or self._silence.owed_s > _FAREWELL_S
        unjudged = any(not peer.beat.over and not peer.beat.failure for peer in self._others())
        return not (self._is_judge and unjudged)

    def _tick(self) -> Verdict | None:
        if self._silence.turn(owed=self._board.busy or self._board.lost) > max(self._patience.silent_s / 2, 5 * BEAT_S):
            self.progress.forgive()  # this thread itself did not run, such as after Ctrl-Z or in a debugger
        os.ftruncate(self._own.trace_file, 0)  # requests from while this thread could not run are over
        self._look()
        sights = self.mates.look()
        if self._store_host in sights and sights[self._store_host].state == "gone":
            self._board.lost = True  # torch would print a page about its host, which is gone
        beat = self._beat(sights)
        news = self._board.exchange(beat, wait_s=BEAT_S)
        if self._store_host == JUDGE != self._own.rank:  # the judge runs if it serves the store
            sights = {JUDGE: Sight("unseen" if news is None else "running")} | sights
        if news is not None:
            self._silence.answer()
            self._told = news.sent.over
        self._note(news, sights)
        before = self._peers[self._own.rank]
        heard_at = before.heard_at if before.beat.over else self._silence.listened_s  # time since which it is over
        self._peers[self._own.rank] = Peer(beat=beat, heard_at=heard_at, sight=Sight("running"), answered=True)
        self._ask_silent()
        if self._is_judge:
            return None if news is None else self._judge_all()
        return self._follow_judge()

    def _ask_silent(self) -> None:
        for peer in self._others() if self._is_judge else [self._peers[JUDGE]]:
            if self._silence.listened_s - peer.heard_at > self._look_after_s and not peer.sight.trace:
                self.mates.ask(peer.beat.rank)

    def _note(self, news: News | None, sights: dict[int, Sight]) -> None:
        """Update the table of processes; `sights` are of those on this machine."""
        beats, seen = ([], {}) if news is None else (news.beats, news.sent.seen)
        if not self._board.lost:
            # A process that is gone may have finished normally: its last heartbeat must have been read since.
            known = {rank for rank, sight in seen.items() if sight.state == "gone"}
            sights = {rank: sight for rank, sight in sights.items() if sight.state != "gone" or rank in known}
        if self._is_judge and news is not None:
            told = [item for beat in beats for item in beat.seen.items()]
            told.sort(key=lambda item: _STATES.index(item[1].state))
            sights = dict.fromkeys(self._peers, Sight("unseen")) | dict(told) | sights
        self._peers = updated(self._peers, beats, sights, now=self._silence.listened_s)

    def _judge_all(self) -> Verdict | None:
        now = self._silence.listened_s
        verdict = diagnose(self._peers, now=now, patience=self._patience) or unanswered(self._peers, now=now)
        if verdict is not None:
            self._board.exchange(replace(self._beat({}), verdict=verdict), wait_s=_FAREWELL_S)
        else:
            self._tell(notice(self._peers, now=now))
        return verdict

    def _tell(self, late: Verdict | None) -> None:
        """Name a rank that is late, once."""
        if late is not None:
            about = late.rank, self._peers[late.rank].beat.events
            if late.reporter == self._own.rank and about not in self._noticed:
                _say(late.message)
            self._noticed.add(about)

    def _follow_judge(self) -> Verdict | None:
        if told := self._peers[JUDGE].beat.verdict:
            return Verdict(*told)
        if self._over:
            return None
        now = self._silence.listened_s + (self._silence.owed_s if self._store_host == JUDGE else 0.0)
        verdict = diagnose_judge(self._peers, me=self._own.rank, now=now, patience=self._patience)
        if verdict is None:
            self._tell(notice_of_judge(self._peers, now=now))
        return verdict

    def _look(self) -> None:
        """Observe the main thread, once it has been idle for some time, until it has failed."""
        if self._failure:
            return
        if self.progress.idle_s() > self._look_after_s:
            stack = stack_of(self._main_thread)
            self._activity.look(stack.text, stack.module)
            if stack.loads and not self._worker:
                self._worker = place_in_worker()
            waits = f", waiting for {self._worker}" if self._worker else ""
            self._stack = stack._replace(place=stack.place + waits)
        else:
            self._stack, self._worker = Stack(), ""
            self._activity.forget()

    def _beat(self, sights: dict[int, Sight]) -> Heartbeat:
        self._number += 1
        self._asked = newest_request() or self._asked
        moment = self.progress.moment
        return replace(
            self._own,
            number=self._number,
            phase=moment.phase,
            step=moment.step,
            events=moment.events,
            idle_s=self.progress.idle_s(),
            expected_s=self.progress.expected_s(),
            place=self._stack.place,
            stack=self._stack.text,
            waits=self._activity.waits,
            works=self._activity.works,
            failure=self._failure,
            quiet=self._quiet,
            asked=self._asked,
            over=self._over,
            seen=sights,
        )

    def _others(self) -> list[Peer]:
        """The other processes, without those that are gone."""
        return [peer for rank, peer in self._peers.items() if rank != self._own.rank and peer.sight.state != "gone"]

    def _conclude(self, verdict: Verdict) -> None:
        self.verdict = verdict
        if verdict.reporter == self._own.rank and verdict.message:
            _say(verdict.message)
        if any((verdict.kind, verdict.rank) != ("silent", peer.beat.rank) for peer in self._others()):
            # Wait until all who can have read it: one that had not would find this process gone and report that.
            time.sleep(2 * (BEAT_S + self._board.answer_s))
        self._concluded.set()
        if verdict.kind == "silent" and verdict.rank != self._store_host:
            # That process cannot end itself. When it is killed its connections close, and main threads that wait for it
            # continue. The process that serves the store is not killed now: torch would print a page about the lost
            # store.
            self.mates.kill(verdict.rank)
        if verdict.kind != "stopped" and (verdict.kind, verdict.rank) != ("hung", self._own.rank):
            time.sleep(self._grace_s)
            self.mates.kill(verdict.rank)
        flush_streams()
        kill_workers()
        self._end(EXIT_STOPPED if verdict.kind == "stopped" else 1)

    def _close(self) -> None:
        if not self._concluded.is_set():
            self._closed.set()
            self._wake.set()
            self.join(2 * BEAT_S)
