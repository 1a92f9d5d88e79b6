"""Which process has caused the end of a run: arithmetic on heartbeats and states, without processes or clocks."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from lit_cifar.watchdog.heartbeat import Heartbeat
from lit_cifar.watchdog.phases import FIRST_TIME_S
from lit_cifar.watchdog.process_info import Sight

# A process that is silent this long after a failure elsewhere is the cause of that failure and not a consequence.
SILENT_AFTER_FAILURE_S = 6.0
# Signals by which libraries end a process that has lost another one, and launchers the remaining processes.
_CONSEQUENCES = ("SIGABRT", "SIGTERM")
_MAX_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which process has caused the end of a run."""

    # "killed" (its process is gone), "silent" (it sends no heartbeats), "failed" (by an exception) or "hung" (its
    # main thread makes no progress).
    kind: Literal["killed", "silent", "failed", "hung"]
    rank: int  # of that process, the culprit; the next four are from its last heartbeat
    pid: int
    host: str
    step: int  # optimizer steps that it had done
    phase: str
    what: str  # what happened, as a clause
    lines: str = ""  # the end of its traceback, or the stack where it hangs
    reporter: int = 0  # the rank that prints the verdict
    quiet: bool = False  # whether the culprit itself prints the message

    def __str__(self) -> str:
        where = f"after {self.step} optimizer steps, phase: {self.phase}"
        first = f"lit_cifar: rank {self.rank} (pid {self.pid} on {self.host}) {self.what}; {where}"
        shown = [f"  {line}" for line in self.lines.splitlines()[-_MAX_LINES:]]
        return "\n".join([first, *shown, "lit_cifar: the other processes stop"])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Verdict":
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What this process knows of one process, itself included."""

    beat: Heartbeat
    heard_at: float  # when it was received, on this process's clock, in seconds
    # State of the process, observed before its latest heartbeat was read. So if it is gone, its last heartbeat is
    # known.
    sight: Sight
    answered: bool = False  # whether a heartbeat was received after a failure or an exit became known


def updated(
    peers: Mapping[int, Peer], beats: Iterable[Heartbeat], sights: Mapping[int, Sight], *, now: float
) -> dict[int, Peer]:
    """`peers` with new states and then new heartbeats."""
    known = any(peer.beat.failure or peer.sight.state == "gone" for peer in peers.values())
    found = {rank: replace(peer, sight=sights.get(rank, peer.sight)) for rank, peer in peers.items()}
    for beat in beats:
        peer = found[beat.rank]
        if beat.number > peer.beat.number:
            found[beat.rank] = replace(peer, beat=beat, heard_at=now, answered=known)
    return found


def diagnose(
    peers: Mapping[int, Peer], *, me: int, now: float, timeout_s: float, store_host: int | None
) -> Verdict | None:
    """The verdict of the rank `me`, or None while there is none.

    It names the first cause: a process that has exited makes others fail, and a failure makes others wait. Of several
    failures the one that was reported first is the cause, because a process reports its failure before it closes its
    connections. Of several processes that are gone it is the one with the oldest heartbeat. One that was ended by
    SIGABRT or SIGTERM is the cause only if all of them were, and all others have answered since.

    A process may be silent for `timeout_s`. `store_host` is the rank whose process serves the store; None if it is
    another process.
    """
    watched = {rank: peer for rank, peer in peers.items() if not peer.beat.over}
    others = {rank: peer for rank, peer in watched.items() if rank != me and not peer.beat.failure}
    failed = [peer for peer in watched.values() if peer.beat.failure]
    gone = [peer for peer in others.values() if peer.sight.state == "gone"]
    left = [peer for peer in others.values() if peer not in gone]
    patience_s = min(timeout_s, SILENT_AFTER_FAILURE_S) if failed or gone else timeout_s
    silent = [peer for peer in left if now - peer.heard_at > patience_s]
    heard = all(peer.answered for peer in left)
    verdict = None
    if gone and (heard or _is_clear(gone, store_host)):
        verdict = _of_gone(gone)
    elif silent:
        verdict = _of_silent(silent, now=now, store_host=store_host)
    elif failed and heard:
        first = min(failed, key=lambda peer: (peer.beat.order or len(peers) + 1, peer.beat.rank))
        verdict = replace(_verdict(first, "failed", "failed", lines=first.beat.failure), quiet=first.beat.quiet)
    elif not failed and not gone and watched and all(_is_late(peer, now) for peer in watched.values()):
        verdict = _of_late(watched, now)
    return verdict and replace(verdict, reporter=_reporter(peers, verdict, now=now, patience_s=patience_s))


def _verdict(peer: Peer, kind: Literal["killed", "silent", "failed", "hung"], what: str, *, lines: str = "") -> Verdict:
    known = {name: getattr(peer.beat, name) for name in ("rank", "pid", "host", "step", "phase")}
    return Verdict(kind=kind, what=what, lines=lines, **known)


def _is_clear(gone: list[Peer], store_host: int | None) -> bool:
    """Whether the cause is certain without further heartbeats; without the store there will be none."""
    return any(peer.sight.ending not in _CONSEQUENCES or peer.beat.rank == store_host for peer in gone)


def _of_gone(gone: list[Peer]) -> Verdict:
    first = min(gone, key=lambda peer: (peer.sight.ending in _CONSEQUENCES, peer.heard_at, peer.beat.rank))
    return _verdict(first, "killed", _how_it_went(first.sight))


def _how_it_went(sight: Sight) -> str:
    if sight.ending == "SIGKILL":
        return "was ended by SIGKILL, as by kill -9 or by the kernel when memory runs out"
    if sight.ending:
        return f"ended without a traceback, by {sight.ending}"
    return "ended without a traceback, as after SIGKILL (by kill -9, or by the kernel when memory runs out)"


def _of_silent(silent: list[Peer], *, now: float, store_host: int | None) -> Verdict:
    """A stopped process if there is one; else the one that serves the store; else the one silent for longest."""
    stopped = [peer for peer in silent if peer.sight.state == "stopped"]
    hosts = [peer for peer in silent if peer.beat.rank == store_host]
    culprit = min(stopped or hosts or silent, key=lambda peer: (peer.heard_at, peer.beat.rank))
    since = f"no heartbeat for {now - culprit.heard_at:.0f} s"
    if culprit.sight.state == "stopped":
        return _verdict(culprit, "silent", f"is stopped, as by SIGSTOP, {since}")
    return _verdict(culprit, "silent", f"is silent, {since}")


def _is_late(peer: Peer, now: float) -> bool:
    return _idle_s(peer, now) > peer.beat.patience_s


def _idle_s(peer: Peer, now: float) -> float:
    return peer.beat.idle_s + now - peer.heard_at


def _of_late(late: Mapping[int, Peer], now: float) -> Verdict | None:
    """The process that is behind the others; of equals one that neither waits for others nor works.

    While that one works the others wait for it, however long its phase took before, so there is no verdict for ten
    minutes. A process that polls in a loop looks the same.
    """
    culprit = min(late.values(), key=lambda peer: (peer.beat.events, peer.beat.waits, peer.beat.works, peer.beat.rank))
    if culprit.beat.works and _idle_s(culprit, now) <= FIRST_TIME_S:
        return None
    others = ", ".join(f"rank {rank}: {peer.beat.phase}" for rank, peer in late.items() if peer is not culprit)
    what = f"hangs: no progress for {_idle_s(culprit, now):.0f} s (it is behind or not waiting; {others})"
    return _verdict(culprit, "hung", what, lines=culprit.beat.stack)


def _reporter(peers: Mapping[int, Peer], verdict: Verdict, *, now: float, patience_s: float) -> int:
    """The lowest rank that can still print, of those that have not finished if there are any."""
    able = [
        rank
        for rank, peer in peers.items()
        if peer.sight.state == "running" or now - peer.heard_at <= patience_s
        if peer.sight.state not in ("gone", "stopped")
        if rank != verdict.rank or verdict.kind == "failed"
    ]
    return min(able, key=lambda rank: (peers[rank].beat.over, rank), default=verdict.rank)
