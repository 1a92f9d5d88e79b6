"""Finds the process that has caused the end of a run: arithmetic on heartbeats and states, without clocks."""

import math
import signal
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lit_cifar.checks.watchdog.activity import FIRST_TIME_S
from lit_cifar.checks.watchdog.heartbeat import Heartbeat, Sight

JUDGE = 0  # the rank that reads all heartbeats
NOTICE_S = 10.0  # a rank that others wait for is named after so long without progress or heartbeat
# A process that is silent this long after a failure elsewhere is the cause of that failure and not a consequence.
SILENT_AFTER_FAILURE_S = 6.0
# Signals by which libraries end a process that has lost another one, and launchers the remaining processes.
_CONSEQUENCES = ("SIGABRT", "SIGTERM")
_MAX_LINES = 12
_MAX_OTHERS = 7

# The process is gone, it sends no heartbeats, it has raised an exception, or its main thread makes no progress. "late":
# it is silent or hangs for so short a time that the run goes on. "stopped": it is late in a run that is to stop.
Kind = Literal["killed", "silent", "failed", "hung", "late", "stopped"]


class Verdict(NamedTuple):
    """The process that has caused the end of a run, or delays it."""

    kind: Kind
    rank: int  # rank of that process, the culprit
    message: str  # "" if the culprit itself prints it
    reporter: int = JUDGE  # the rank that prints the message


@dataclass(frozen=True, kw_only=True)
class Peer:
    """This process's knowledge of one process, itself included."""

    beat: Heartbeat
    # Time when `beat` was new, as `SilenceClock.listened_s` of this process: clocks of machines are never compared.
    heard_at: float
    # State of the process. If it is gone this was observed before its latest heartbeat was read, so that is its last.
    sight: Sight
    answered: bool = False  # whether a heartbeat was received after a failure or an exit became known


def updated(
    peers: Mapping[int, Peer], beats: Iterable[Heartbeat], sights: Mapping[int, Sight], *, now: float
) -> dict[int, Peer]:
    """`peers` with new states and then new heartbeats."""
    known = any(peer.beat.failure or peer.sight.state == "gone" for peer in peers.values())
    found = dict(peers)
    for rank, sight in sights.items():
        if found[rank].sight != sight:
            found[rank] = replace(found[rank], sight=sight)
    for beat in beats:
        peer = found[beat.rank]
        if beat.number > peer.beat.number:
            found[beat.rank] = replace(peer, beat=beat, heard_at=now, answered=known)
    return found


class Patience(NamedTuple):
    """Seconds for which a run goes on."""

    silent_s: float  # while a process sends no heartbeats and is not seen to run
    hung_s: float = math.inf  # while a rank is late, see `Watchdog`
    waiting_s: float = math.inf  # while a rank waits in a collective operation: torch itself gives up then


def diagnose(peers: Mapping[int, Peer], *, now: float, patience: Patience) -> Verdict | None:
    """The verdict of the judge on all ranks, or None while there is none.

    It names the first cause: a process that has exited makes others fail, and a failure makes others wait. Of several
    failures the one that was reported first is the cause, because a process reports its failure before it closes its
    connections. Of several processes that are gone it is the one with the oldest heartbeat. One that was ended by
    SIGABRT or SIGTERM is the cause only if all of them were, and all others have answered since. If one has failed or
    aborted because it had waited for another for as long as torch does, that other one is the cause.
    """
    watched = {rank: peer for rank, peer in peers.items() if not peer.beat.over}
    others = [peer for rank, peer in watched.items() if rank != JUDGE and not peer.beat.failure]
    failed = [peer for peer in watched.values() if peer.beat.failure]
    gone = [peer for peer in others if peer.sight.state == "gone"]
    left = [peer for peer in others if peer.sight.state != "gone"]
    patience_s = min(patience.silent_s, SILENT_AFTER_FAILURE_S) if failed or gone else patience.silent_s
    silent = [peer for peer in left if now - peer.heard_at > patience_s]
    lost = [peer for peer in silent if _is_lost(peer, now=now, patience=patience)]
    held = {peer.beat.rank for peer in silent} - {peer.beat.rank for peer in lost}
    heard = all(peer.answered for peer in left if peer.beat.rank not in held)
    if gone and (heard or not all(map(_is_consequence, gone))):
        return _of_late_for(_first_gone(gone), watched, patience) or _of_gone(gone)
    if lost:
        return _of_silent(lost, now=now)
    if failed and heard:
        first = min(failed, key=lambda peer: (peer.beat.order or len(peers) + 1, peer.beat.rank))
        return _of_late_for(first, watched, patience) or _of_failed(first)
    if not failed and not gone and _all_late(peers, patience.hung_s):
        culprit, why = _of_late(watched)
        # While the culprit works the others wait for it, however long its phase took before. A process that polls in a
        # loop looks the same, unless it waits for a GPU, see `Activity`.
        if culprit.beat.idle_s > FIRST_TIME_S or not culprit.beat.works:
            return _hangs("hung", culprit, why)
    return None


def _is_lost(silent: Peer, *, now: float, patience: Patience) -> bool:
    """Whether a silent process does not run, as far as is known: else its main thread keeps the interpreter's lock."""
    return silent.sight.state != "running" or now - silent.heard_at > patience.hung_s


def notice(peers: Mapping[int, Peer], *, now: float) -> Verdict | None:
    """The rank that the others wait for, before `diagnose` ends the run for it, and while it may still get on.

    A rank that works is named too, but not in a phase that it is in for the first time: it may compile. A rank that
    waits there, for its GPU for example, is not named either, unless all wait and not in the same place: then none gets
    on.
    """
    watched = {rank: peer for rank, peer in peers.items() if not peer.beat.over}
    if len(peers) < 2 or not watched or any(p.beat.failure or p.sight.state == "gone" for p in watched.values()):
        return None
    silent = [peer for rank, peer in watched.items() if rank != JUDGE and now - peer.heard_at > NOTICE_S]
    if silent:
        return _of_silent(silent, now=now, kind="late")
    if not _all_late(peers, NOTICE_S, first_time_s=0.0):
        return None
    culprit, why = _of_late(watched)
    if (left := sorted(peers.keys() - watched.keys())) and all(peer.beat.waits for peer in watched.values()):
        return _hangs("late", culprit, f"it waits, and rank {left[0]} has left the run")
    if len(watched) < 2:
        return None
    others_wait = any(peer.beat.waits or peer.beat.events > culprit.beat.events for peer in watched.values())
    first_time = culprit.beat.expected_s == FIRST_TIME_S and not _wait_apart(watched.values())
    if (culprit.beat.works and not others_wait) or (first_time and (culprit.beat.works or culprit.beat.waits)):
        return None
    return _hangs("late", culprit, why)


def unanswered(peers: Mapping[int, Peer], *, now: float) -> Verdict | None:
    """The end of a run in which a rank was asked to stop and none gets on to answer: they wait in different places."""
    watched = {rank: peer for rank, peer in peers.items() if not peer.beat.over}
    asked = max((peer.beat.asked for peer in watched.values()), default=0)
    if not asked or not _wait_apart(watched.values()) or notice(peers, now=now) is None:
        return None
    culprit, why = _of_late(watched)
    name = signal.Signals(asked).name
    return _hangs("stopped", culprit, f"{why}; no rank can answer {name}, so all end, and nothing is saved")


def _wait_apart(watched: Collection[Peer]) -> bool:
    return all(peer.beat.waits for peer in watched) and len({*map(_place, watched)}) > 1


def diagnose_judge(peers: Mapping[int, Peer], *, me: int, now: float, patience: Patience) -> Verdict | None:
    """The verdict of any other rank, which can only be on the judge: it is gone or lost.

    `peers` are the judge, `me` and the other ranks on this machine, of which only the state is known. If one of these
    ranks was killed, and not aborted, the judge has probably been lost with it, and that rank is named.
    """
    judge = peers[JUDGE]
    is_gone = judge.sight.state == "gone"
    patience_s = min(patience.silent_s, SILENT_AFTER_FAILURE_S) if peers[me].beat.failure else patience.silent_s
    is_lost = now - judge.heard_at > patience_s and _is_lost(judge, now=now, patience=patience)
    if judge.beat.over or not (is_gone or is_lost):
        return None
    killed = [peer for peer in peers.values() if peer.sight.ending.startswith("SIG") and not _is_consequence(peer)]
    if killed:
        step, phase = peers[me].beat.step, "not known here"
        read = [p if p is judge else replace(p, beat=replace(p.beat, step=step, phase=phase)) for p in killed]
        verdict = _of_gone(read)
    elif is_gone and judge.beat.failure:
        verdict = _of_failed(judge)
    else:
        verdict = _of_gone([judge]) if is_gone else _of_silent([judge], now=now)
    return _reported(verdict, peers)


def notice_of_judge(peers: Mapping[int, Peer], *, now: float) -> Verdict | None:
    """The notice of any other rank on the judge; see `notice`."""
    judge = peers[JUDGE]
    if judge.beat.over or judge.sight.state == "gone" or now - judge.heard_at <= NOTICE_S:
        return None
    return _reported(_of_silent([judge], now=now, kind="late"), peers)


def _reported(verdict: Verdict, peers: Mapping[int, Peer]) -> Verdict:
    able = [rank for rank, peer in peers.items() if peer.sight.state == "running" and rank not in (JUDGE, verdict.rank)]
    return verdict._replace(reporter=min(able))


def _verdict(peer: Peer, kind: Kind, what: str, *, lines: str = "") -> Verdict:
    """`what` happened, as a clause; `lines` are the end of its traceback, or the stack where it hangs."""
    beat = peer.beat
    where = f"after {beat.step} optimizer steps, phase: {beat.phase}"
    first = f"lit_cifar: rank {beat.rank} (pid {beat.pid} on {beat.host}) {what}; {where}"
    shown = [f"  {line}" for line in (lines or peer.sight.trace).splitlines()[-_MAX_LINES:]]
    last = f"lit_cifar: the other processes {'wait' if kind == 'late' else 'stop'}"
    return Verdict(kind, beat.rank, "\n".join([first, *shown, last]))


def _is_consequence(peer: Peer) -> bool:
    return peer.sight.ending in _CONSEQUENCES


def _first_gone(gone: list[Peer]) -> Peer:
    return min(gone, key=lambda peer: (_is_consequence(peer), peer.heard_at, peer.beat.rank))


def _of_gone(gone: list[Peer]) -> Verdict:
    first = _first_gone(gone)
    ending, kill = first.sight.ending, "by kill -9 or by the kernel when memory runs out"
    if ending == "SIGKILL":
        return _verdict(first, "killed", f"was ended by SIGKILL, as {kill}")
    how = f"by {ending}" if ending else "by a fatal signal" if first.sight.trace else f"as after SIGKILL ({kill})"
    return _verdict(first, "killed", f"ended without a traceback, {how}")


def _of_failed(peer: Peer) -> Verdict:
    verdict = _verdict(peer, "failed", "failed", lines=peer.beat.failure)
    return verdict._replace(message="") if peer.beat.quiet else verdict


def _of_silent(silent: list[Peer], *, now: float, kind: Kind = "silent") -> Verdict:
    """A stopped process if there is one; otherwise the one silent for longest."""
    stopped = [peer for peer in silent if peer.sight.state == "stopped"]
    culprit = min(stopped or silent, key=lambda peer: (peer.heard_at, peer.beat.rank))
    runs = "silent, though its process runs" if culprit.sight.state == "running" else "silent"
    state = "stopped, as by SIGSTOP" if stopped else runs
    return _verdict(culprit, kind, f"is {state}, no heartbeat for {now - culprit.heard_at:.0f} s")


def _all_late(peers: Mapping[int, Peer], patience_s: float, *, first_time_s: float = FIRST_TIME_S) -> bool:
    """Whether all that have not finished are, and have said so since others finished: these ended their waiting."""
    finished_at = max((peer.heard_at for peer in peers.values() if peer.beat.over), default=-math.inf)
    watched = [peer for peer in peers.values() if not peer.beat.over]
    for beat in (peer.beat for peer in watched):
        expected_s = first_time_s if beat.expected_s == FIRST_TIME_S else beat.expected_s
        if beat.idle_s <= max(patience_s, expected_s):
            return False
    return bool(watched) and min(peer.heard_at for peer in watched) > finished_at


def _of_late(late: Mapping[int, Peer]) -> tuple[Peer, str]:
    """The process that the others wait for, and the reason.

    It is behind the others; of equals it neither waits for others nor works. If all wait, it is not where most are:
    their collective operations do not match.
    """
    culprit = min(late.values(), key=lambda peer: (peer.beat.events, peer.beat.waits, peer.beat.works, peer.beat.rank))
    why = "it computes or waits for a disk" if culprit.beat.works else "it is behind or not waiting"
    waits = all(peer.beat.waits for peer in late.values())
    if waits:
        # One that has fewer batches than others is in the next loop.
        odd = _unlike_most(late, _place) or _unlike_most(late, lambda peer: "validat" in peer.beat.phase)
        culprit = odd[0] if odd else culprit
        why = "it waits elsewhere than most" if odd else "all wait"
    beats = [peer.beat for peer in late.values() if peer is not culprit]
    others = [f"rank {beat.rank}: {beat.phase}" + f", {beat.place}" * waits for beat in beats]
    return culprit, f"{why}; {', '.join([*others[:_MAX_OTHERS], *(['...'] if others[_MAX_OTHERS:] else [])])}"


def _of_late_for(first: Peer, late: Mapping[int, Peer], patience: Patience) -> Verdict | None:
    """The verdict on the rank for which `first` has waited, if it failed because torch waits no longer."""
    aborted = bool(first.beat.failure) or first.sight.ending == "SIGABRT"
    culprit, why = _of_late(late)
    if not aborted or not first.beat.waits or first.beat.idle_s < patience.waiting_s or culprit is first:
        return None
    return _hangs("hung", culprit, f"{why}; rank {first.beat.rank} has waited {first.beat.idle_s:.0f} s, torch's limit")


def _unlike_most(late: Mapping[int, Peer], key: Callable[[Peer], Hashable]) -> list[Peer]:
    ((most, number),) = Counter(map(key, late.values())).most_common(1)
    return [peer for peer in late.values() if key(peer) != most] if 2 * number > len(late) else []


def _place(peer: Peer) -> Hashable:
    return peer.beat.events, peer.beat.stack


def _hangs(kind: Kind, culprit: Peer, why: str) -> Verdict:
    beat = culprit.beat
    what = f"{'hangs' if kind == 'hung' else 'is late'}: no progress for {beat.idle_s:.0f} s"
    return _verdict(culprit, kind, f"{what} at {beat.place or beat.phase} ({why})", lines=beat.stack)
