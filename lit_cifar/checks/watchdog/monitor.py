"""The watchdog's thread: it writes heartbeats, judges those that it reads, and ends its process."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from lit_cifar.checks.watchdog import diagnosis
from lit_cifar.checks.watchdog.diagnosis import JUDGE, SILENT_AFTER_FAILURE_S, Patience, Peer, Verdict
from lit_cifar.checks.watchdog.heartbeat import Heartbeat, Mates, Sight
from lit_cifar.checks.watchdog.progress import Progress
from lit_cifar.checks.watchdog.store import HeartbeatStore
from lit_cifar.errors import printable
from lit_cifar.launch.startup import kill_workers

BEAT_S = 1.0
# Time for the main thread to end by its own exception, which closes loggers and files.
GRACE_S = 4.0
_STATES = ("unseen", "running", "stopped", "gone")  # states of one process, in the order in which they may be seen
# Seconds that the judge, when it has finished, waits for others that have not, and any other rank for one answer.
_FAREWELL_S = 10.0
# The most seconds that a turn counts. In a longer one this process was not run, as after Ctrl-Z, and has seen nothing.
_MOST_S = 2.0


class Monitor(threading.Thread):
    """Watches all processes of a run, in a thread of one of them; in all but the judge's it watches the judge.

    One process reports a verdict, see `diagnose`, on stderr. Then each ends: by an exception of its main thread, which
    a broken connection raises in most, or some seconds later without one.

    A process is judged by whether its heartbeat has changed between two reads. The time for that, `listened_s`, is that
    of the turns in which the store has answered: a slow store is not silence. If it owes one answer for as long
    (`owed_s`) the judge is silent too, which usually serves it.
    """

    def __init__(
        self,
        everyone: Sequence[Heartbeat],
        *,
        rank: int,
        board: HeartbeatStore,
        patience: Patience,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.verdict: Verdict | None = None
        self._beat = everyone[rank]  # the latest one of this process
        self.mates = Mates(everyone, self._beat)
        self._is_judge = rank == JUDGE
        self._board = board
        self._patience = patience
        self._progress = progress
        self._failure: str | None = None
        self._over = self._has_said_over = False
        self._wake, self._closed, self._concluded = threading.Event(), threading.Event(), threading.Event()
        self._clock, self._turn_at = clock, clock()
        self._listened_s = self._owed_s = 0.0
        seen = self.mates.look()
        watched = everyone if self._is_judge else [each for each in everyone if each.rank in {JUDGE, rank, *seen}]
        sights = dict.fromkeys(range(len(everyone)), Sight("unseen")) | seen | {rank: Sight("running")}
        self._peers = {each.rank: Peer(beat=each, sight=sights[each.rank]) for each in watched}

    # The main thread calls these.

    def fail(self, failure: str) -> Verdict | None:
        """Report that the main thread has failed, and return the verdict.

        `failure` is the end of its traceback, or "" if the main thread prints the message itself.
        """
        self._failure = failure
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
        if (verdict := self._watch()) is not None:
            self._conclude(verdict)

    def _watch(self) -> Verdict | None:
        farewell_at = 0.0
        while not self._closed.is_set():
            if (verdict := self._tick()) is not None:
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
        if not self._has_said_over:  # otherwise the others would report this process as killed
            return self._board.lost or self._owed_s > _FAREWELL_S
        unjudged = any(not peer.beat.over and not peer.has_failed for peer in self._others())
        return not (self._is_judge and unjudged)

    def _tick(self) -> Verdict | None:
        now = self._clock()
        passed_s, self._turn_at = min(now - self._turn_at, _MOST_S), now
        if self._failure is None:
            self._progress.look(passed_s)
        sights = self.mates.look()
        if JUDGE in sights and sights[JUDGE].state == "gone":
            self._board.lost = True  # torch would print a page about its host
        self._beat = self._next_beat(sights)
        if not (beats := self._board.exchange(self._beat, wait_s=BEAT_S)):
            self._owed_s += passed_s
        else:
            self._listened_s, self._owed_s = self._listened_s + passed_s, 0.0
            self._has_said_over = beats[0].over
        self._note(beats, sights)
        if not self._is_judge:
            return self._follow_judge()
        if not beats:
            return None
        verdict = diagnosis.diagnose(self._peers, now=self._listened_s, patience=self._patience)
        if verdict is not None:
            self._board.exchange(replace(self._next_beat({}), verdict=verdict), wait_s=_FAREWELL_S)
        return verdict

    def _note(self, beats: list[Heartbeat], sights: dict[int, Sight]) -> None:
        """Update the table of processes; `sights` are of those on this machine."""
        sent = beats[0].seen if beats else {}
        if not self._board.lost:
            # A process that is gone may have finished normally: its last heartbeat must have been read since.
            known = {rank for rank, sight in sent.items() if sight.state == "gone"}
            sights = {rank: sight for rank, sight in sights.items() if sight.state != "gone" or rank in known}
        if self._is_judge and beats:
            # Two ranks of a machine that is gone would say of each other for ever that they run.
            fresh = (b for b in beats[1:] if self._listened_s - self._peers[b.rank].heard_at < SILENT_AFTER_FAILURE_S)
            seen_by_others = sorted((i for b in fresh for i in b.seen.items()), key=lambda i: _STATES.index(i[1].state))
            sights = dict.fromkeys(self._peers, Sight("unseen")) | dict(seen_by_others) | sights
        self._peers = diagnosis.updated(self._peers, beats or [self._beat], sights, now=self._listened_s)

    def _follow_judge(self) -> Verdict | None:
        if verdict := self._peers[JUDGE].beat.verdict:
            return Verdict(*verdict)
        if self._over:
            return None
        now = self._listened_s + self._owed_s
        return diagnosis.diagnose_judge(self._peers, me=self._beat.rank, now=now, patience=self._patience)

    def _next_beat(self, sights: dict[int, Sight]) -> Heartbeat:
        return replace(
            self._beat,
            number=self._beat.number + 1,
            step=self._progress.count()[0],
            place=self._progress.place,
            idle_s=self._progress.idle_s,
            over=self._over,
            failure=self._failure,
            seen=sights,
        )

    def _others(self) -> list[Peer]:
        """The other processes, without those that are gone."""
        return [peer for rank, peer in self._peers.items() if rank != self._beat.rank and peer.sight.state != "gone"]

    def _conclude(self, verdict: Verdict) -> None:
        self.verdict = verdict
        if verdict.reporter == self._beat.rank and verdict.message:
            with suppress(OSError, ValueError):  # of a program that is not ours, which may have closed it
                print(printable(verdict.message, lines=True), file=sys.stderr, flush=True)
        if any((verdict.kind, verdict.rank) != ("silent", peer.rank) for peer in self._others()):
            # Wait until all who can have read it: one that had not would find this process gone and report that.
            time.sleep(2 * (BEAT_S + self._board.answer_s))
        self._concluded.set()
        if verdict.kind == "silent" and verdict.rank != JUDGE:
            # That process cannot end itself. When it is killed its connections close, and main threads that wait for it
            # continue. The judge is not killed now: torch would print a page about the store that it serves.
            self.mates.kill(verdict.rank)
        if verdict.kind != "hung":  # otherwise no main thread ends by itself
            time.sleep(GRACE_S)
            self.mates.kill(verdict.rank)
        with suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()
        kill_workers()
        os._exit(1)

    def _close(self) -> None:
        if not self._concluded.is_set():
            self._closed.set()
            self._wake.set()
            self.join(2 * BEAT_S)
