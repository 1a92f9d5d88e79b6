"""The watchdog's thread: it sends heartbeats, judges those of the others, and ends its process."""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lit_cifar.watchdog import process_info as process
from lit_cifar.watchdog.activity import Activity
from lit_cifar.watchdog.diagnosis import SILENT_AFTER_FAILURE_S, Peer, Verdict, diagnose, updated
from lit_cifar.watchdog.heartbeat import Heartbeat, stack_of
from lit_cifar.watchdog.phases import FIRST_TIME_S, PhaseTimer
from lit_cifar.watchdog.process_info import Sight
from lit_cifar.watchdog.store import HeartbeatStore

BEAT_S = 1.0
# Time for the main thread to end by its own exception, which closes loggers and files.
GRACE_S = 4.0
# How long the process that serves the store waits, when it has finished, for others that have not.
_FAREWELL_S = 10.0


class Monitor(threading.Thread):
    """Watches all processes of a run, in a thread of one of them.

    A process has caused the end of a run if it has exited without a message, if it sends no heartbeat for `timeout_s`
    (it is stopped, or its machine is lost), if it was the first to fail by an exception, or if no main thread makes
    progress and its own is behind the others. One process reports that on stderr. Then each ends: by an exception of
    its main thread, which a broken connection raises in most, or after `grace_s` without one.
    """

    def __init__(
        self,
        everyone: Sequence[Heartbeat],
        *,
        rank: int,
        board: HeartbeatStore,
        progress: PhaseTimer,
        timeout_s: float,
        store_host: int | None = None,
        grace_s: float = GRACE_S,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.verdict: Verdict | None = None
        # Exit codes, as of `Popen`, of the processes that this one has started, by pid: only the parent knows them.
        self.exit_codes: Callable[[], dict[int, int]] = dict
        self._own = everyone[rank]
        self._board = board
        self._progress = progress
        self._timeout_s = timeout_s
        self._store_host = store_host
        self._grace_s = grace_s
        self._end = end
        self._main_thread = threading.main_thread().ident or 0
        peers = {beat.pid for beat in everyone if beat.host == self._own.host}
        self._activity = Activity(peers=peers, memory_s=timeout_s / 2, clock=progress.clock)
        self._failure = ""
        self._quiet = False
        self._over = self._told = False
        self._number = 0
        self._stack = ""
        self._wake, self._closed, self._concluded = threading.Event(), threading.Event(), threading.Event()
        now = progress.clock()
        self._ticked_at = now
        self._peers = {
            beat.rank: Peer(beat=beat, heard_at=now, sight=_first_sight(beat, self._own)) for beat in everyone
        }

    # For the main thread.

    def fail(self, failure: str, *, quiet: bool = False) -> Verdict | None:
        """Report that the main thread has failed, with the end of its traceback, and return the verdict once there is
        one.

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
        self.join(_FAREWELL_S + 2 * BEAT_S)
        atexit.unregister(self._close)

    # The thread.

    def run(self) -> None:
        """Send and diagnose heartbeats until there is a verdict or the run has ended."""
        # An interpreter that shuts down must not have a thread in torch's C++: that ends in SIGABRT.
        atexit.register(self._close)
        verdict = self._watch()
        self._board.close()
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
                done = self._told and not self._is_needed()
                if done or time.monotonic() - farewell_at > _FAREWELL_S:
                    return None
            self._wake.wait(BEAT_S / 10 if self._over else BEAT_S)
            self._wake.clear()
        return None

    def _tick(self) -> Verdict | None:
        self._forgive_suspension()
        self._look()
        sights = self._sights()
        if self._store_host in sights and sights[self._store_host].state == "gone":
            self._board.lost = True  # torch would print a page about its host, which is gone
        beat = self._beat()
        news = self._board.exchange(beat, wait_s=BEAT_S)
        # Otherwise the others would report this process as killed when it ends.
        self._told = beat.over and (news is not None or self._board.lost)
        if news is not None and news.verdict is not None:
            return news.verdict
        if news is None and not self._board.lost:
            # A process that is gone may have finished normally: wait for its last heartbeat.
            sights = {rank: sight for rank, sight in sights.items() if sight.state != "gone"}
        now = self._progress.clock()
        own = Peer(beat=self._beat(), heard_at=now, sight=Sight("running"), answered=True)
        heard = [] if news is None else news.beats
        self._peers = updated(self._peers, heard, sights, now=now) | {self._own.rank: own}
        verdict = diagnose(
            self._peers, me=self._own.rank, now=now, timeout_s=self._timeout_s, store_host=self._store_host
        )
        return verdict and self._board.publish(verdict, wait_s=BEAT_S)

    def _look(self) -> None:
        """Observe the main thread, once it has been idle for some time."""
        if self._progress.idle_s() > self._timeout_s / 2:
            self._stack, module = stack_of(self._main_thread)
            self._activity.look(module)
        else:
            self._stack = ""
            self._activity.forget()

    def _beat(self) -> Heartbeat:
        self._number += 1
        moment = self._progress.moment
        return replace(
            self._own,
            number=self._number,
            phase=moment.phase,
            step=moment.step,
            events=moment.events,
            idle_s=self._progress.idle_s(),
            patience_s=self._progress.patience_s(),
            stack=self._stack,
            waits=self._activity.waits,
            works=self._activity.works,
            failure=self._failure,
            quiet=self._quiet,
            over=self._over,
        )

    def _sights(self) -> dict[int, Sight]:
        codes = self.exit_codes()
        sights = {}
        for rank, peer in self._peers.items():
            if rank == self._own.rank or peer.sight.state in ("unseen", "gone"):
                continue
            sight = process.look_at(peer.beat.pid, peer.beat.started)
            code = codes.get(peer.beat.pid)
            sights[rank] = sight if code is None else Sight("gone", process.ending(code))
        return sights

    def _forgive_suspension(self) -> None:
        """Restart all timing if this thread itself did not run, as after Ctrl-Z or in a debugger."""
        now = self._progress.clock()
        if now - self._ticked_at > max(self._timeout_s / 2, 5 * BEAT_S):
            self._progress.forgive()
            self._peers = {rank: replace(peer, heard_at=now) for rank, peer in self._peers.items()}
        self._ticked_at = now

    def _is_needed(self) -> bool:
        """Whether this process serves the store to others that have not finished."""
        return self._store_host == self._own.rank and any(
            not peer.beat.over and not peer.beat.failure and peer.sight.state != "gone"
            for rank, peer in self._peers.items()
            if rank != self._own.rank
        )

    def _conclude(self, verdict: Verdict) -> None:
        self.verdict = verdict
        if verdict.reporter == self._own.rank and not verdict.quiet:
            print(verdict, file=sys.stderr, flush=True)
        if self._has_readers(verdict):
            # Wait until all have read it: one that had not would find this process gone and report that.
            time.sleep(2 * BEAT_S)
        self._concluded.set()
        if verdict.kind == "silent" and verdict.rank != self._store_host:
            # It cannot end itself. When it is killed its connections close, and main threads that wait for it continue.
            # The process that serves the store is not killed now: torch would print a page about the lost store.
            self._kill(verdict.rank)
        if (verdict.kind, verdict.rank) != ("hung", self._own.rank):
            time.sleep(self._grace_s)
            self._kill(verdict.rank)
        sys.stdout.flush()
        sys.stderr.flush()
        self._end(1)

    def _has_readers(self, verdict: Verdict) -> bool:
        """Whether other processes can read the verdict: those that are neither gone nor its silent culprit."""
        return any(
            peer.sight.state != "gone" and (verdict.kind, verdict.rank) != ("silent", rank)
            for rank, peer in self._peers.items()
            if rank != self._own.rank
        )

    def _kill(self, rank: int) -> None:
        peer = self._peers[rank]
        if rank != self._own.rank and peer.sight.state != "unseen":
            process.kill(peer.beat.pid, peer.beat.started)

    def _close(self) -> None:
        if not self._concluded.is_set():
            self._closed.set()
            self._wake.set()
            self.join(2 * BEAT_S)


def first_heartbeat(rank: int) -> Heartbeat:
    pid = os.getpid()
    started = process.start_time(pid)
    return Heartbeat(rank=rank, pid=pid, started=started, host=socket.gethostname(), patience_s=FIRST_TIME_S)


def _first_sight(beat: Heartbeat, own: Heartbeat) -> Sight:
    """The first state of a process; one that has sent a heartbeat but is not found runs in another container."""
    sight = process.look_at(beat.pid, beat.started) if beat.host == own.host else Sight("unseen")
    return Sight("unseen") if sight.state == "gone" else sight
