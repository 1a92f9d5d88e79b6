"""Which process is to blame: arithmetic on what was heard and seen, without processes, threads or clocks."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from lit_cifar.watchdog.beat import Beat
from lit_cifar.watchdog.process import Sight
from lit_cifar.watchdog.progress import FIRST_TIME_S

# After a failure somewhere: a process that is silent for so long has not failed in consequence, it came first.
SILENT_AFTER_FAILURE_S = 6.0
# How libraries end a process that has lost another one, and launchers those that are left.
_CONSEQUENCES = ("SIGABRT", "SIGTERM")
_MAX_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who is to blame for the end of a run.

    Attributes:
        kind: "killed" (its process is gone), "silent" (nothing is heard of it any more), "failed" (an exception) or
            "hung" (its main thread does not get on).
        rank: Of the culprit; its last beat has the following four.
        pid: On its host.
        host: Its machine's name.
        step: Optimizer steps that it had done.
        phase: What its main thread did.
        what: What happened, a clause.
        lines: The end of its traceback, or where it hangs.
        reporter: The rank that says so.
        quiet: Whether the culprit says it itself.
    """

    kind: Literal["killed", "silent", "failed", "hung"]
    rank: int
    pid: int
    host: str
    step: int
    phase: str
    what: str
    lines: str = ""
    reporter: int = 0
    quiet: bool = False

    def __str__(self) -> str:
        where = f"after {self.step} optimizer steps, phase: {self.phase}"
        first = f"lit_cifar: rank {self.rank} (pid {self.pid} on {self.host}) {self.what}; {where}"
        shown = [f"  {line}" for line in self.lines.splitlines()[-_MAX_LINES:]]
        return "\n".join([first, *shown, "lit_cifar: the other processes stop"])

    def to_json(self) -> str:
        """One line of text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Verdict":
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What is known of one process, oneself included.

    Attributes:
        beat: The latest that was heard.
        heard_at: When, on one's own clock, in seconds.
        sight: What is seen of it, looked at before its latest beat was read: the last words of one that is gone are
            then known.
        answered: Whether a beat was heard since a failure or an end has been known.
    """

    beat: Beat
    heard_at: float
    sight: Sight
    answered: bool = False


def updated(
    peers: Mapping[int, Peer], beats: Iterable[Beat], sights: Mapping[int, Sight], *, now: float
) -> dict[int, Peer]:
    """`peers` with what was seen and then heard."""
    known = any(peer.beat.failure or peer.sight.state == "gone" for peer in peers.values())
    found = {rank: replace(peer, sight=sights.get(rank, peer.sight)) for rank, peer in peers.items()}
    for beat in beats:
        peer = found[beat.rank]
        if beat.number > peer.beat.number:
            found[beat.rank] = replace(peer, beat=beat, heard_at=now, answered=known)
    return found


def judge(
    peers: Mapping[int, Peer], *, me: int, now: float, timeout_s: float, store_host: int | None
) -> Verdict | None:
    """The verdict, if there is one to be given already.

    The first cause is looked for: a process that is gone without a word makes others fail, and a failure makes others
    wait. Of several failures the one that was told first is the cause, as a process tells before it lets go of its
    connections. Of several that are gone it is the one of which nothing was heard for longest; one that was ended by
    SIGABRT or SIGTERM only if all of them were, and all others have answered since.

    Args:
        peers: By rank.
        me: The rank that judges.
        now: On the clock of `Peer.heard_at`, in seconds.
        timeout_s: How long a process may be silent.
        store_host: The rank through whose process all beats come; None if that is none of them.
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
    beat = peer.beat
    return Verdict(
        kind=kind,
        rank=beat.rank,
        pid=beat.pid,
        host=beat.host,
        step=beat.step,
        phase=beat.phase,
        what=what,
        lines=lines,
    )


def _is_clear(gone: list[Peer], store_host: int | None) -> bool:
    """Whether nothing further can show one of these to be a consequence; without the store nothing is heard."""
    return any(peer.sight.ending not in _CONSEQUENCES or peer.beat.rank == store_host for peer in gone)


def _of_gone(gone: list[Peer]) -> Verdict:
    first = min(gone, key=lambda peer: (peer.sight.ending in _CONSEQUENCES, peer.heard_at, peer.beat.rank))
    return _verdict(first, "killed", _how_it_went(first.sight))


def _how_it_went(sight: Sight) -> str:
    if sight.ending == "SIGKILL":
        return "was ended by SIGKILL, as kill -9 does, and the kernel when memory runs out"
    if sight.ending:
        return f"ended without a traceback, by {sight.ending}"
    return "ended without a traceback, as after SIGKILL (kill -9, or the kernel when memory runs out)"


def _of_silent(silent: list[Peer], *, now: float, store_host: int | None) -> Verdict:
    """If all are, then the one through which they are heard."""
    stopped = [peer for peer in silent if peer.sight.state == "stopped"]
    hosts = [peer for peer in silent if peer.beat.rank == store_host]
    culprit = min(stopped or hosts or silent, key=lambda peer: (peer.heard_at, peer.beat.rank))
    since = f"nothing heard of it for {now - culprit.heard_at:.0f} s"
    if culprit.sight.state == "stopped":
        return _verdict(culprit, "silent", f"is stopped, as by SIGSTOP, {since}")
    return _verdict(culprit, "silent", f"is silent, {since}")


def _is_late(peer: Peer, now: float) -> bool:
    return _idle_s(peer, now) > peer.beat.patience_s


def _idle_s(peer: Peer, now: float) -> float:
    return peer.beat.idle_s + now - peer.heard_at


def _of_late(late: Mapping[int, Peer], now: float) -> Verdict | None:
    """The one that is behind the others; of equals the one that does not wait for others, nor works.

    One that works is what the others wait for, whatever its phase has taken before: None for ten minutes. What spins
    looks the same.
    """
    culprit = min(late.values(), key=lambda peer: (peer.beat.events, peer.beat.waits, peer.beat.works, peer.beat.rank))
    if culprit.beat.works and _idle_s(culprit, now) <= FIRST_TIME_S:
        return None
    others = ", ".join(f"rank {rank}: {peer.beat.phase}" for rank, peer in late.items() if peer is not culprit)
    what = f"hangs: no progress for {_idle_s(culprit, now):.0f} s (it is behind or not waiting; {others})"
    return _verdict(culprit, "hung", what, lines=culprit.beat.stack)


def _reporter(peers: Mapping[int, Peer], verdict: Verdict, *, now: float, patience_s: float) -> int:
    """The lowest rank that can still speak, of those that have not finished if there are any."""
    able = [
        rank
        for rank, peer in peers.items()
        if peer.sight.state == "running" or now - peer.heard_at <= patience_s
        if peer.sight.state not in ("gone", "stopped")
        if rank != verdict.rank or verdict.kind == "failed"
    ]
    return min(able, key=lambda rank: (peers[rank].beat.over, rank), default=verdict.rank)
