"""Finds the process that has caused the end of a run: arithmetic on heartbeats and states, without clocks."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lit_cifar.checks.watchdog.heartbeat import Heartbeat, Sight

JUDGE = 0  # the rank that reads all heartbeats
NOBODY = -1  # the rank to blame where none gets on
# A process that is silent this long after a failure elsewhere is the cause of that failure and not a consequence.
SILENT_AFTER_FAILURE_S = 6.0
# Signals by which libraries end a process that has lost another one, and launchers the remaining processes.
_CONSEQUENCES = ("SIGABRT", "SIGTERM")
_MAX_PLACES, _MAX_RANKS = 5, 8
_STANDS_S = 5.0  # a rank that has not got on for so long is mentioned with the culprit

# The process is gone, it sends no heartbeats, it has raised an exception, or no rank gets on.
Kind = Literal["killed", "silent", "failed", "hung"]


class Verdict(NamedTuple):
    """The cause of the end of a run."""

    kind: Kind
    rank: int  # rank of that process, the culprit
    message: str  # "" if the culprit itself prints it
    reporter: int = JUDGE  # the rank that prints the message


@dataclass(frozen=True, kw_only=True)
class Peer:
    """This process's knowledge of one process, itself included."""

    beat: Heartbeat
    # State of the process. If it is gone this was observed before its latest heartbeat was read, so that is its last.
    sight: Sight
    # Time when `beat` was new, as `listened_s` of this process's `Monitor`: clocks of machines are never compared.
    heard_at: float = 0.0
    answered: bool = False  # whether a heartbeat was received after a failure or an exit became known

    @property
    def rank(self) -> int:
        return self.beat.rank

    @property
    def has_failed(self) -> bool:
        return self.beat.failure is not None

    @property
    def is_gone(self) -> bool:
        return self.sight.state == "gone"

    def idle_s(self, now: float) -> float:
        """Seconds in which this rank has not got on; one that has finished stands since then."""
        return now - self.heard_at + (0.0 if self.beat.over else self.beat.idle_s)


def updated(
    peers: Mapping[int, Peer], beats: Iterable[Heartbeat], sights: Mapping[int, Sight], *, now: float
) -> dict[int, Peer]:
    """`peers` with new states and then new heartbeats."""
    known = any(peer.has_failed or peer.is_gone for peer in peers.values())
    found = {rank: replace(peer, sight=sights.get(rank, peer.sight)) for rank, peer in peers.items()}
    for beat in beats:
        peer = found[beat.rank]
        if beat.number > peer.beat.number:
            heard_at = peer.heard_at if peer.beat.over else now
            found[beat.rank] = replace(peer, beat=beat, heard_at=heard_at, answered=known)
    return found


class Patience(NamedTuple):
    """Seconds for which a run goes on."""

    silent_s: float  # while a process sends no heartbeats and is not seen to run
    hung_s: float = math.inf  # while no rank gets on, see `Watchdog`

    def has_lost(self, silent: Peer, *, now: float) -> bool:
        """Whether it does not run, as far as is known: else its main thread keeps the interpreter's lock."""
        return silent.sight.state != "running" or now - silent.heard_at > self.hung_s


def diagnose(peers: Mapping[int, Peer], *, now: float, patience: Patience) -> Verdict | None:
    """The verdict of the judge on all ranks, or None while there is none.

    It names the first cause: a process that has exited makes others fail, and a failure makes others wait. Of several
    failures the one that was reported first is the cause, because a process reports its failure before it closes its
    connections. Of several processes that are gone it is the one with the oldest heartbeat. One that was ended by
    SIGABRT or SIGTERM is the cause only if all of them were, and all others have answered since.
    """
    watched = [peer for peer in peers.values() if not peer.beat.over]
    others = [peer for peer in watched if peer.rank != JUDGE and not peer.has_failed]
    failed = [peer for peer in watched if peer.has_failed]
    gone = [peer for peer in others if peer.is_gone]
    left = [peer for peer in others if not peer.is_gone]
    patience_s = min(patience.silent_s, SILENT_AFTER_FAILURE_S) if failed or gone else patience.silent_s
    silent = [peer for peer in left if now - peer.heard_at > patience_s]
    lost = [peer for peer in silent if patience.has_lost(peer, now=now)]
    held = {peer.rank for peer in silent} - {peer.rank for peer in lost}
    heard = all(peer.answered for peer in left if peer.rank not in held)
    hung_s = min(peer.idle_s(now) for peer in peers.values())
    if gone and (heard or not all(map(_is_consequence, gone))):
        verdict = _of_gone(gone)
    elif lost:
        verdict = _of_silent(lost, now=now)
    elif failed and heard:
        verdict = _of_failed(min(failed, key=lambda peer: (peer.beat.order, peer.rank)))
    elif watched and not failed and not gone and hung_s > patience.hung_s:
        verdict = Verdict("hung", NOBODY, f"lit_cifar: no rank has got on for {hung_s:.0f} s")
    else:
        return None
    return _with_others(verdict, [peer for peer in watched if not peer.is_gone], now=now)


def diagnose_judge(peers: Mapping[int, Peer], *, me: int, now: float, patience: Patience) -> Verdict | None:
    """The verdict of any other rank, which can only be on the judge: it is gone or lost.

    `peers` are the judge, `me` and the other ranks on this machine, of which only the state is known. If one of these
    ranks was killed, and not aborted, the judge has probably been lost with it, and that rank is named.
    """
    judge = peers[JUDGE]
    patience_s = min(patience.silent_s, SILENT_AFTER_FAILURE_S) if peers[me].has_failed else patience.silent_s
    is_lost = now - judge.heard_at > patience_s and patience.has_lost(judge, now=now)
    if judge.beat.over or not (judge.is_gone or is_lost):
        return None
    killed = [peer for peer in peers.values() if peer.sight.ending.startswith("SIG") and not _is_consequence(peer)]
    if killed:
        verdict = _of_gone(killed)
    elif judge.is_gone:
        verdict = _of_failed(judge) if judge.has_failed else _of_gone([judge])
    else:
        verdict = _of_silent([judge], now=now)
    able = [rank for rank, peer in peers.items() if peer.sight.state == "running" and rank not in (JUDGE, verdict.rank)]
    return _with_others(verdict, [], now=now)._replace(reporter=min(able))


def _is_consequence(peer: Peer) -> bool:
    return peer.sight.ending in _CONSEQUENCES


def _of_gone(gone: list[Peer]) -> Verdict:
    first = min(gone, key=lambda peer: (_is_consequence(peer), peer.heard_at, peer.rank))
    ending, kill = first.sight.ending, "by kill -9 or by the kernel when memory runs out"
    how = f"without a traceback, by {ending}" if ending else f"without a traceback, as after SIGKILL ({kill})"
    return _verdict(first, "killed", f"was ended by SIGKILL, as {kill}" if ending == "SIGKILL" else f"ended {how}")


def _of_silent(silent: list[Peer], *, now: float) -> Verdict:
    """A stopped process if there is one; otherwise the one silent for longest."""
    stopped = [peer for peer in silent if peer.sight.state == "stopped"]
    culprit = min(stopped or silent, key=lambda peer: (peer.heard_at, peer.rank))
    runs = "silent, though its process runs" if culprit.sight.state == "running" else "silent"
    state = "stopped, as by SIGSTOP" if stopped else runs
    return _verdict(culprit, "silent", f"is {state}, no heartbeat for {now - culprit.heard_at:.0f} s")


def _of_failed(peer: Peer) -> Verdict:
    return _verdict(peer, "failed", "failed") if peer.beat.failure else Verdict("failed", peer.rank, "")


def _verdict(peer: Peer, kind: Kind, what: str) -> Verdict:
    """`what` happened, as a clause, and where the process was at its last heartbeat."""
    first = f"lit_cifar: {_named(peer)} {what}"
    if peer.beat.number:  # otherwise this process does not read its heartbeats
        first += f"; after {peer.beat.step} optimizer steps"
    if peer.beat.place and not peer.has_failed:
        first += f", at {peer.beat.place}"
    shown = [f"  {line}" for line in (peer.beat.failure or "").splitlines()]
    return Verdict(kind, peer.rank, "\n".join([first, *shown]))


def _with_others(verdict: Verdict, others: Iterable[Peer], *, now: float) -> Verdict:
    """The verdict with where the others stand that have not got on for some time: first what fewest do."""
    groups: dict[str, list[Peer]] = {}
    for peer in sorted(others, key=lambda peer: peer.rank):
        if peer.rank != verdict.rank and (peer.idle_s(now) > _STANDS_S or verdict.kind == "hung"):
            groups.setdefault(peer.beat.place, []).append(peer)
    lines = [verdict.message]
    for place, (first, *more) in sorted(groups.items(), key=lambda group: len(group[1]))[:_MAX_PLACES]:
        ranks = [str(peer.rank) for peer in more[:_MAX_RANKS]] + ["..."] * (len(more) > _MAX_RANKS)
        as_others = f" (and rank {', '.join(ranks)})" if more else ""
        lines.append(f"  {_named(first)}{as_others} has been for {first.idle_s(now):.0f} s at {place}")
    lines.append(f"lit_cifar: {'all' if verdict.kind == 'hung' else 'the other'} processes stop")
    return verdict._replace(message="\n".join(lines) if verdict.message else "")


def _named(peer: Peer) -> str:
    return f"rank {peer.rank} (pid {peer.beat.pid} on {peer.beat.host})"
