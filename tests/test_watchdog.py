"""The watchdog's verdicts as a table; two watches in one process; and the notes of the main thread."""

import ctypes
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from faulthandler import disable as disable_faulthandler
from faulthandler import enable as enable_faulthandler
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import lightning as L
import psutil
import pytest
import torch
from commands import graded
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from processes import is_running, wait_until
from torch.distributed import HashStore
from torch.utils.data import DataLoader, Dataset

import lit_cifar
from lit_cifar import internals
from lit_cifar.checks.watchdog import HELPER, activity
from lit_cifar.checks.watchdog import heartbeat as process
from lit_cifar.checks.watchdog import monitor as watch_module
from lit_cifar.checks.watchdog.activity import FIRST_TIME_S, PhaseTimer
from lit_cifar.checks.watchdog.callback import PHASES, Watchdog
from lit_cifar.checks.watchdog.diagnosis import (
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
from lit_cifar.checks.watchdog.heartbeat import Heartbeat, Sight, first_heartbeat
from lit_cifar.checks.watchdog.monitor import BEAT_S, Monitor
from lit_cifar.checks.watchdog.stacks import (
    REQUEST,
    described,
    leave_traces,
    place_in_worker,
    read_trace,
    request,
    trace_file,
)
from lit_cifar.checks.watchdog.store import HeartbeatStore, News, prepare
from lit_cifar.cli.main import main
from lit_cifar.data import Batch
from lit_cifar.errors import ConfigError
from lit_cifar.launch import startup
from lit_cifar.launch.signals import launched_by_lightning

TIMEOUT_S = 20.0
DEFAULT = Patience(TIMEOUT_S, waiting_s=1800.0)
BRIEF = DEFAULT._replace(hung_s=TIMEOUT_S)  # as with --watchdog.hang_timeout_s


def peer(
    rank: int,
    *,
    heard_at: float = 100.0,
    state: str = "running",
    ending: str = "",
    answered: bool = False,
    **beat: object,
) -> Peer:
    told = Heartbeat(rank=rank, pid=1000 + rank, started="1", host="a", **beat)
    return Peer(beat=told, heard_at=heard_at, sight=Sight(state, ending), answered=answered)


def gone(rank: int, ending: str = "", **rest: Any) -> Peer:
    return peer(rank, state="gone", ending=ending, **rest)


def verdict_of(*peers: Peer, patience: Patience = BRIEF) -> Verdict | None:
    return diagnose({peer.beat.rank: peer for peer in peers}, now=100.0, patience=patience)


LOOPS = ("backward", "validation step", "optimizer step")
WAITS = {"idle_s": 30, "waits": True}
NOBODY = [
    (peer(0), peer(1, heard_at=80.5)),  # silent, but not for long
    (peer(0), peer(1, state="stopped")),  # it may go on
    (peer(0), gone(1, over=True)),  # finished earlier
    (peer(0, over=True), peer(1, over=True)),
    (peer(0, idle_s=90), peer(1, idle_s=3)),  # waits for one that gets on
    (peer(0, idle_s=90), peer(1, idle_s=90, expected_s=FIRST_TIME_S)),  # which compiles, or writes its first checkpoint
    # One that is behind, or in the same phase, computes for longer than ever: compiles again, has a slow disk.
    (peer(0, idle_s=90, events=8, waits=True), peer(1, idle_s=90, events=7, works=True)),
    (peer(0, idle_s=599, waits=True), peer(1, idle_s=599, works=True), peer(2, idle_s=599, waits=True)),
    # Aborted, perhaps because of another process: what has become of the others is not known yet.
    (peer(0), gone(1, "SIGABRT"), peer(2, heard_at=95, state="unseen")),
    (peer(0, failure="E", order=1), peer(1)),  # the other has not answered yet: it may be the cause
    (peer(0, failure="E", order=1), peer(1, heard_at=95)),
]
CULPRITS = [
    (1, "killed", peer(0), gone(1)),
    # Who is killed takes the others along: NCCL aborts those that survive, launchers terminate them.
    (2, "killed", peer(0), gone(1, "SIGABRT"), gone(2, "SIGKILL")),
    (2, "killed", peer(0), gone(1, "SIGTERM"), gone(2, "SIGSEGV")),
    # Of equals the one that was not heard of for longest, then the lowest.
    (2, "killed", peer(0), gone(1, heard_at=99), gone(2, heard_at=97)),
    (2, "killed", peer(0), gone(1, "SIGABRT", heard_at=99), gone(2, "SIGABRT", heard_at=97)),
    (1, "killed", peer(0), gone(1, "SIGKILL"), gone(2, "SIGKILL")),
    # One that was aborted by itself, once the others have answered.
    (1, "killed", peer(0), gone(1, "SIGABRT"), peer(2, answered=True)),
    (1, "killed", peer(0, failure="closed", order=1), gone(1, "SIGABRT")),
    # One that was aborted because a machine was lost.
    (2, "silent", peer(0), gone(1, "SIGABRT"), peer(2, heard_at=93, state="unseen")),
    # A broken connection is the consequence of a death, and not its cause.
    (1, "killed", peer(0, failure="closed by peer", order=1), gone(1)),
    (0, "failed", peer(0, failure="E", order=1), gone(1, failure="closed", order=2)),
    (1, "silent", peer(0), peer(1, heard_at=79, state="stopped")),
    (2, "silent", peer(0), peer(1, heard_at=78, state="unseen"), peer(2, heard_at=79, state="stopped")),
    # After a failure a machine that is silent was lost before; the patience for it is short.
    (1, "silent", peer(0, failure="closed", order=1), peer(1, heard_at=93, state="unseen"), peer(2, answered=True)),
    # The first that told is the cause, if all others are well.
    (1, "failed", peer(0, answered=True), peer(1, failure="E", order=1)),
    (1, "failed", peer(0, failure="closed", order=2), peer(1, failure="E", order=1)),
    # The one that is behind; of equals the one that does not wait for others; the first.
    (1, "hung", peer(0, idle_s=30, events=8), peer(1, idle_s=21, events=7)),
    (1, "hung", peer(0, events=8, **WAITS), peer(1, idle_s=21, events=8)),
    # What spins while it waits, or sleeps where others work, or works for more than ten minutes.
    (1, "hung", peer(0, idle_s=30, events=8, works=True), peer(1, idle_s=21, events=7)),
    (1, "hung", peer(0, idle_s=30, works=True), peer(1, idle_s=21), peer(2, **WAITS)),
    (0, "hung", peer(0, **WAITS), peer(1, **WAITS)),
    (1, "hung", peer(0, idle_s=601, waits=True), peer(1, idle_s=601, works=True)),
    (1, "hung", peer(0, over=True, heard_at=99), peer(1, idle_s=30), peer(2, **WAITS)),
    # All wait, but one in another collective operation than most; or there is no majority.
    (2, "hung", *(peer(rank, stack="ab"[rank == 2], **WAITS) for rank in range(3))),
    (1, "hung", *(peer(rank, events=8 + (rank == 1), **WAITS) for rank in range(3))),
    (0, "hung", *(peer(rank, stack="ab"[rank == 1], **WAITS) for rank in range(2))),
    (1, "hung", *(peer(rank, stack="abc"[rank], phase=phase, **WAITS) for rank, phase in enumerate(LOOPS))),
]
# Who is named before that: `CULPRITS` who are silent or hang are named earlier, and who works is named too.
FIRST = {"expected_s": FIRST_TIME_S}
LATE: list[tuple[int | None, list[Peer]]] = [
    (1, [peer(0), peer(1, heard_at=89)]),
    (1, [peer(0, idle_s=11, waits=True), peer(1, idle_s=11)]),
    (1, [peer(0, idle_s=11, waits=True), peer(1, idle_s=11, works=True)]),
    (1, [peer(0, idle_s=11, events=8, works=True), peer(1, idle_s=11, works=True)]),
    (1, [peer(0, idle_s=11, waits=True, **FIRST), peer(1, idle_s=11, **FIRST)]),
    (None, [peer(0), peer(1, heard_at=91)]),
    (None, [peer(0, failure="E", order=1, idle_s=11), peer(1, idle_s=11)]),  # these are not over
    (None, [peer(0, idle_s=11, waits=True), gone(1, "SIGABRT", idle_s=11), peer(2, idle_s=11)]),
    (None, [peer(0, idle_s=11, waits=True), peer(1, idle_s=9)]),
    (None, [peer(0, idle_s=11, waits=True), peer(1, idle_s=11, expected_s=12)]),
    (None, [peer(0, idle_s=11, works=True), peer(1, idle_s=11, works=True)]),  # nobody waits
    (None, [peer(0, idle_s=11, waits=True), peer(1, idle_s=11, works=True, **FIRST)]),  # it may compile
    (None, [peer(0, idle_s=11, waits=True, **FIRST), peer(1, idle_s=11, waits=True, **FIRST)]),  # a GPU does
    (0, [peer(0, idle_s=11, waits=True, stack="a", **FIRST), peer(1, idle_s=11, waits=True, stack="b", **FIRST)]),
    (0, [peer(0, idle_s=11, waits=True), peer(1, over=True, heard_at=99)]),  # which will never come
    (None, [peer(0, over=True), peer(1, over=True)]),
    (None, [peer(0, over=True, heard_at=99), peer(1, idle_s=11)]),  # nobody waits for it
    (None, [peer(0, over=True), peer(1, idle_s=30)]),  # it waited for one that has finished
]


@pytest.mark.parametrize(
    ("stopped", "of_rank_1"),
    [
        (True, {"asked": signal.SIGTERM}),
        (True, {"asked": signal.SIGTERM, "idle_s": 90, "expected_s": FIRST_TIME_S}),
        (False, {}),
        (False, {"asked": signal.SIGTERM, "stack": "a"}),  # one collective, which may be slow
        (False, {"asked": signal.SIGTERM, "waits": False, "works": True}),
        (False, {"asked": signal.SIGTERM, "waits": False}),  # it sleeps, and will answer
        (False, {"asked": signal.SIGTERM, "idle_s": 9}),
    ],
)
def test_who_is_asked_to_stop_is_not_waited_for_where_none_gets_on(stopped: bool, of_rank_1: dict[str, Any]) -> None:
    waiting: dict[str, Any] = {"idle_s": 11, "waits": True}
    verdict = unanswered(
        {0: peer(0, stack="a", **waiting), 1: peer(1, **{"stack": "b", **waiting, **of_rank_1})}, now=100.0
    )
    assert (verdict is not None) == stopped
    assert verdict is None or (verdict.kind, "SIGTERM" in verdict.message) == ("stopped", True)


def told(verdict: Verdict | None) -> tuple[int, str, int] | None:
    """Whom it blames, for what, and who says so."""
    return verdict and (verdict.rank, verdict.kind, verdict.reporter)


@pytest.mark.parametrize(
    ("peers", "expected"),
    [*((peers, None) for peers in NOBODY), *((peers, (rank, kind, 0)) for rank, kind, *peers in CULPRITS)],
)
def test_the_judge_says_who_is_to_blame(peers: list[Peer], expected: tuple[int, str, int] | None) -> None:
    assert told(verdict_of(*peers)) == expected
    if expected is None or expected[1] == "hung":  # no run is ended for lateness, unless the user says so
        assert verdict_of(*peers, patience=DEFAULT) is None


# For torch's whole limit rank 1 has waited for rank 0, which sleeps, say.
LONG = {"idle_s": 1800.0, "events": 8}
GIVES_UP = {"waits": True, "failure": "Timed out", "order": 1, **LONG}
GAVE_UP = [
    (0, "hung", peer(0, **LONG), peer(1, **GIVES_UP)),
    (0, "hung", peer(0, **LONG), gone(1, "SIGABRT", waits=True, **LONG)),  # as NCCL ends it
    (2, "hung", peer(0, **GIVES_UP), peer(1, waits=True, **LONG), peer(2, **LONG)),
    (1, "failed", peer(0, **LONG), peer(1, **{**GIVES_UP, "idle_s": 1799.0})),
    (1, "failed", peer(0, waits=True, **LONG), peer(1, idle_s=1800.0, events=7, failure="E", order=1)),
    (1, "killed", peer(0, **LONG), gone(1, "SIGKILL", waits=True, **LONG)),
]


@pytest.mark.parametrize(("culprit", "kind", "peers"), [(rank, kind, peers) for rank, kind, *peers in GAVE_UP])
def test_who_was_waited_for_is_to_blame_when_torch_waits_no_longer(culprit: int, kind: str, peers: list[Peer]) -> None:
    verdict = verdict_of(*(replace(peer, answered=True) for peer in peers), patience=DEFAULT)
    assert told(verdict) == (culprit, kind, 0)


@pytest.mark.parametrize("silent", [0, 2])
def test_a_process_that_is_silent_and_seen_to_run_is_late_and_not_lost(silent: int) -> None:
    """Its main thread keeps the interpreter's lock, as a large `json.loads` does."""
    judges = diagnose if silent else partial(diagnose_judge, me=1)
    for state, patience, kind in (
        ("running", DEFAULT, None),
        ("running", BRIEF, "silent"),
        ("stopped", DEFAULT, "silent"),
        ("unseen", DEFAULT, "silent"),
    ):
        peers = {rank: peer(rank) for rank in range(3)} | {silent: peer(silent, heard_at=40, state=state)}
        verdict = judges(peers, now=100.0, patience=patience)
        assert (verdict and (verdict.rank, verdict.kind)) == (kind and (silent, kind))
    failed = peer(1, failure="E", order=1)
    held = peer(2, heard_at=90)
    assert told(verdict_of(peer(0, answered=True), failed, held, patience=DEFAULT)) == (1, "failed", 0)


@pytest.mark.parametrize(("culprit", "peers"), LATE)
def test_a_rank_that_keeps_others_waiting_is_named_before_it_ends_the_run(
    culprit: int | None, peers: list[Peer]
) -> None:
    verdict = notice({peer.beat.rank: peer for peer in peers}, now=100.0)
    assert told(verdict) == (None if culprit is None else (culprit, "late", 0))
    assert verdict_of(*peers) is verdict_of(*peers, patience=DEFAULT) is None


@pytest.mark.parametrize(("judge", "late"), [(peer(0, heard_at=91), False), (peer(0, heard_at=89), True)])
def test_the_others_name_a_judge_that_is_silent(judge: Peer, late: bool) -> None:
    peers = {0: judge, 1: peer(1, state="stopped"), 2: peer(2)}
    assert told(notice_of_judge(peers, now=100.0)) == ((0, "late", 2) if late else None)


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ((peer(0, heard_at=80.5), peer(1, heard_at=0, idle_s=99), peer(2)), None),
        ((peer(0, state="stopped"), peer(1, failure="closed"), peer(2)), None),
        ((gone(0, over=True), peer(1), peer(2)), None),
        ((gone(0), peer(1), peer(2)), (0, "killed", 1)),
        ((gone(0), peer(1, state="stopped"), peer(2)), (0, "killed", 2)),
        ((gone(0, "SIGABRT"), gone(1, "SIGKILL"), peer(2)), (1, "killed", 2)),
        ((gone(0), gone(1), peer(2)), (0, "killed", 2)),  # has rank 1 finished?
        ((gone(0, failure="E", order=1), peer(1), peer(2)), (0, "failed", 1)),
        ((peer(0, heard_at=79, state="stopped"), peer(1), peer(2)), (0, "silent", 1)),
        ((peer(0, heard_at=93, state="unseen"), peer(1), peer(2, failure="closed")), (0, "silent", 1)),
        ((peer(0, heard_at=79, state="unseen"), gone(1, "SIGBUS"), peer(2)), (1, "killed", 2)),
    ],
)
def test_the_others_judge_the_judge(peers: tuple[Peer, ...], expected: tuple[int, str, int] | None) -> None:
    table = {peer.beat.rank: peer for peer in peers}
    assert told(diagnose_judge(table, me=max(table), now=100.0, patience=DEFAULT)) == expected


def test_an_answer_is_a_beat_that_was_heard_after_the_failure_or_the_end_of_another() -> None:
    own_failure = replace(peer(0).beat, failure="E", number=1)
    for told, seen in (([own_failure], {}), ([], {0: Sight("gone")})):
        beat = peer(1).beat
        peers = updated({0: peer(0), 1: peer(1)}, [*told, replace(beat, number=1)], seen, now=101.0)
        assert not peers[1].answered  # written before, perhaps
        peers = updated(peers, [replace(beat, number=1)], {}, now=102.0)
        assert (peers[1].answered, peers[1].heard_at) == (False, 101.0)
        peers = updated(peers, [replace(beat, number=2)], {1: Sight("stopped")}, now=103.0)
        assert (peers[1].answered, peers[1].sight.state) == (True, "stopped")


class Clock:
    """Stands until told otherwise."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_patience_is_five_times_the_longest_of_the_phase() -> None:
    clock = Clock()
    progress = PhaseTimer(clock=clock)
    progress.enter("step")
    assert progress.expected_s() == FIRST_TIME_S  # nothing is known yet
    clock.now += 60
    assert progress.idle_s() == 60
    for duration_s, expected_s in ((1, 300), (1, 300), (2, 300), (10, 10), (0, 50)):  # the first was warming up
        progress.enter("between")
        progress.enter("step")
        assert progress.expected_s() == expected_s
        clock.now += duration_s
    clock.now += 1000
    progress.forgive()  # it was suspended
    clock.now += 2
    assert progress.idle_s() == 2
    progress.enter("between")
    progress.enter("step")
    assert progress.expected_s() == 50


def test_a_batch_of_another_shape_has_a_first_time_of_its_own() -> None:
    """As the last one of an epoch, for which a compiled network is compiled again; in backward as well."""
    clock = Clock()
    progress = PhaseTimer(clock=clock)
    for shape in (32, 32, 32, 32, 32, 20, 32, 20):
        for phase in ("step", "backward"):
            progress.enter(phase, shape=shape if phase == "step" else None)
            clock.now += 100 if shape == 20 else 1
    for shape, expected_s in ((32, 5), (20, 500), (7, FIRST_TIME_S)):
        for phase in ("step", "backward"):
            progress.enter(phase, shape=shape if phase == "step" else None)
            assert progress.expected_s() == expected_s


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeping:
        yield sleeping
        sleeping.kill()


def beat_of(child: subprocess.Popen[bytes]) -> Heartbeat:
    return replace(first_heartbeat(1), pid=child.pid, started=process.start_time(child.pid))


def test_processes_are_seen_to_stop_and_to_end(child: subprocess.Popen[bytes]) -> None:
    started = process.start_time(child.pid)
    assert process.look_at(child.pid, started).state == "running"
    assert process.look_at(child.pid, started + "0") == Sight("gone")  # another one with the same pid
    child.send_signal(signal.SIGSTOP)
    while process.look_at(child.pid, started).state != "stopped":
        time.sleep(0.01)
    process.kill(child.pid, started + "0")
    assert process.look_at(child.pid, started).state == "stopped"
    process.kill(child.pid, started)
    while process.look_at(child.pid, started).state != "gone":
        time.sleep(0.01)
    assert process.look_at(child.pid, started) == Sight("gone", "SIGKILL")
    child.wait()
    assert process.look_at(child.pid, started) == Sight("gone")
    assert [process.ending(code) for code in (3, -99)] == ["exit status 3", "signal 99"]


def test_a_process_in_another_network_is_not_seen_to_run(child: subprocess.Popen[bytes]) -> None:
    """Its machine may be lost while it runs; that it ends is seen."""
    here, there = beat_of(child), replace(beat_of(child), rank=2, network="net:[1]")
    mates = process.Mates([first_heartbeat(0), here, there], first_heartbeat(0))
    assert {rank: sight.state for rank, sight in mates.look().items()} == {1: "running", 2: "unseen"}
    child.kill()
    child.wait()
    assert {sight.state for sight in mates.look().values()} == {"gone"}
    mates.close()


def in_fork(target: Callable[[], object], *, daemon: bool = False) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=target, daemon=daemon)
    process.start()
    return process


def test_who_is_killed_takes_its_workers_along_and_no_other_rank() -> None:
    code = "import os, time; print(os.fork() and os.fork(), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        for _ in range(3):
            rank.stdout.readline()
        worker, other = psutil.Process(rank.pid).children()
        process.kill(rank.pid, process.start_time(rank.pid), ranks=[rank.pid, other.pid])
        psutil.wait_procs([worker], timeout=5)
        assert (is_running(worker), is_running(other)) == (False, True)
        other.kill()


def matches_a_bad_pattern() -> None:
    """For ever, with the interpreter's lock."""
    re.match(r"(a+)+$", 60 * "a" + "b")


def test_a_process_leaves_its_line_when_it_keeps_the_lock_or_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a second run of this process too: at the end of the first one Lightning has put all handlers back."""
    monkeypatch.setattr("faulthandler.is_enabled", lambda: False)
    enable, disable = Mock(), Mock()
    monkeypatch.setattr("faulthandler.enable", enable)
    monkeypatch.setattr("faulthandler.disable", disable)
    trace_file.cache_clear()  # an earlier test may have found faulthandler enabled
    file = trace_file(os.getpid())
    leave_traces(file)
    signal.signal(REQUEST, signal.SIG_DFL)
    unable = in_fork(lambda: time.sleep(60))
    leave_traces(file)
    enable.assert_called_with(file)
    for target, error in ((matches_a_bad_pattern, ""), (lambda: crashes(file), "Fatal Python error: Aborted")):
        os.ftruncate(file, 0)
        process = in_fork(target)
        while (error or "matches_a_bad") not in (text := read_trace(file)):
            if not error:
                assert process.is_alive()
                os.ftruncate(file, 0)  # it may have been asked before it was there
                request(process.pid or 0, file)
            time.sleep(0.1)
        process.kill()
        process.join()
        assert re.search(rf'{__file__}", line \d+, in (matches_a_bad_pattern|crashes)', text)
    with subprocess.Popen(["sleep", "60"]) as stranger:  # neither has a handler, and the signal would end it
        for pid in (stranger.pid, unable.pid):
            request(pid or 0, file)
        assert place_in_worker() == ""
        assert (stranger.poll(), unable.exitcode) == (None, None)
        stranger.kill()
    unable.kill()
    unable.join()


def crashes(file: int) -> None:
    """In a thread without Python, as one of gloo's, where it waits."""
    disable_faulthandler()  # pytest's, whose handlers may be gone
    enable_faulthandler(file)
    libc = ctypes.CDLL(None)
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
    time.sleep(60)


class Waits(Dataset[int]):
    """Of which no sample can be read until `go`."""

    def __init__(self) -> None:
        self.go = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        self.go.wait(60)
        return index


def test_the_line_of_a_worker_is_told_while_it_does_something() -> None:
    leave_traces(trace_file(os.getpid()))
    data = Waits()
    samples = iter(DataLoader(data, num_workers=1, multiprocessing_context="fork"))
    (worker,) = samples._workers  # type: ignore[attr-defined]
    place = rf"process {worker.pid} at {__file__}:\d+ \(__getitem__\)"
    assert wait_until(lambda: bool(re.fullmatch(place, place_in_worker())), limit_s=60)
    data.go.set()
    assert wait_until(lambda: not place_in_worker(), limit_s=60)
    os.kill(worker.pid, signal.SIGSTOP)
    assert wait_until(lambda: place_in_worker() == f"process {worker.pid}, which is stopped", limit_s=60)
    os.kill(worker.pid, signal.SIGCONT)
    assert next(samples) == 0


def test_a_place_is_the_collective_operation_and_the_innermost_line_that_is_not_a_librarys() -> None:
    called = [FrameSummary("/home/train.py", 90, "main"), FrameSummary("/home/train.py", 16, "training_step")]
    inner = [
        FrameSummary(f"{torch.__path__[0]}/{file}", 5, file[-4]) for file in ("nn/a.py", "nn/b.py", "nn/c.py", "d.py")
    ]
    reduced = FrameSummary(f"{torch.__path__[0]}/distributed/distributed_c10d.py", 7, "all_reduce")
    assert described([*called, *inner]).place == "/home/train.py:16 (training_step)"
    assert described([*called, *inner, reduced]).place == "all_reduce, called at /home/train.py:16 (training_step)"
    assert re.findall(r"in (\w+)", described([*called, *inner]).text) == ["training_step", "a", "b", "c", "d"]
    assert re.findall(r"in (\w+)", described([*called, *inner[:3]]).text) == ["training_step", "a", "b", "c"]
    assert described(inner).place == ""


class CountingStore:
    """A store of this process's memory that counts what is asked of it."""

    def __init__(self, world_size: int) -> None:
        self.entries = {f"beat{rank}": "" for rank in range(world_size)}
        self.num_calls = self.num_keys = 0

    def set(self, key: str, value: str) -> None:
        self.num_calls, self.num_keys = self.num_calls + 1, self.num_keys + 1
        self.entries[key] = value

    def multi_get(self, keys: list[str]) -> list[str]:
        self.num_calls, self.num_keys = self.num_calls + 1, self.num_keys + len(keys)
        return [self.entries[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        return amount


class LateCalls:
    """In place of the thread that calls the store: answers `answer_s` after it was asked, by a clock that stands."""

    def __init__(self, board: HeartbeatStore, store: CountingStore, clock: Clock, answer_s: float) -> None:
        self._board, self._clock, self.answer_s = board, clock, answer_s
        board._store = cast(Any, store)
        board._calls = board._answers = cast(Any, self)

    def put(self, beat: Heartbeat) -> None:
        self._beat, self._due = beat, self._clock.now + self.answer_s

    def get(self, *, timeout: float | None = None) -> News | None:
        if timeout is None:
            return None  # ends the thread
        if self._clock.now < self._due:
            raise Empty
        return self._board._exchange(self._beat)


class Cluster:
    """Watches of many ranks, each on a machine of its own, in a time that passes when it is told to."""

    def __init__(self, num_ranks: int, *, answer_s: float = 0.0, store_host: int | None = 0) -> None:
        self.clock, self.store = Clock(), CountingStore(num_ranks)
        first = Heartbeat(
            rank=0, pid=1, started="1", host="", trace_file=trace_file(os.getpid()), expected_s=FIRST_TIME_S
        )
        everyone = [replace(first, rank=rank, host=f"node{rank}") for rank in range(num_ranks)]
        boards = [HeartbeatStore(HashStore(), run="", rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
        for board in boards:
            board.close()
        self.calls = [LateCalls(board, self.store, self.clock, answer_s) for board in boards]
        self.watches = [
            Monitor(
                everyone,
                rank=rank,
                board=boards[rank],
                patience=DEFAULT,
                clock=self.clock,
                store_host=store_host,
            )
            for rank in range(num_ranks)
        ]

    def run(self, for_s: float, *, every_s: float = BEAT_S, without: set[int] = frozenset()) -> Verdict | None:
        """The first verdict within this time, in which the other ranks make progress."""
        end = self.clock.now + for_s
        while self.clock.now < end:
            for rank, watch in enumerate(self.watches):
                watch.progress.enter("step")
                if rank not in without and (verdict := watch._tick()) is not None:
                    return verdict
            self.clock.now += every_s
        return None


def test_the_stores_work_grows_with_the_number_of_ranks() -> None:
    """Every rank writes a key and reads one, and rank 0 reads them all."""
    num_ranks = 64
    cluster = Cluster(num_ranks)
    assert cluster.run(for_s=3) is None
    assert cluster.store.num_calls == 3 * 2 * num_ranks
    assert cluster.store.num_keys < 3 * 3 * num_ranks


@pytest.mark.parametrize("num_ranks", graded(50, exhaustive=[1000]))
def test_a_slow_store_is_not_silence(num_ranks: int) -> None:
    cluster = Cluster(num_ranks, answer_s=3)
    assert cluster.run(600, every_s=3) is None
    assert cluster.store.num_calls == 2 * num_ranks * 600 / 6  # they ask and wait all the time


@pytest.mark.parametrize("runs_s", [0, 100])
@pytest.mark.parametrize(("answer_s", "within_s"), [(0, TIMEOUT_S + 3), (0.5, 2 * TIMEOUT_S + 5)])
@pytest.mark.parametrize("silent", [3, 0])
def test_a_rank_that_is_silent_is_named(silent: int, answer_s: float, within_s: float, runs_s: float) -> None:
    cluster = Cluster(8, answer_s=answer_s, store_host=None)
    assert cluster.run(runs_s) is None
    assert cluster.run(TIMEOUT_S - 1, without={silent}) is None
    verdict = cluster.run(within_s - TIMEOUT_S + 1, without={silent})
    assert (told(verdict) or ())[:2] == (silent, "silent")


def test_a_judge_that_is_silent_and_serves_the_store_runs() -> None:
    cluster = Cluster(4, store_host=0)
    assert cluster.run(30) is None
    assert cluster.run(100, without={0}) is None


@pytest.mark.parametrize(("store_host", "culprit"), [(0, 0), (None, None)])
def test_a_store_without_answers_is_the_silence_of_its_host(store_host: int | None, culprit: int | None) -> None:
    cluster = Cluster(4, store_host=store_host)
    assert cluster.run(30) is None
    for calls in cluster.calls:
        calls.answer_s = math.inf
    assert cluster.run(TIMEOUT_S - 1) is None
    verdict = cluster.run(100)
    assert (verdict and verdict.rank) == culprit


def test_who_was_suspended_blames_nobody() -> None:
    """With all others, as a laptop, or alone: a rank that was not run for an hour has seen nothing."""
    cluster = Cluster(8)
    for first in ({0}, {1, 2, 3, 4, 5, 6, 7}):
        assert cluster.run(30) is None
        assert cluster.run(3, without=first) is None  # they stop a moment before the others
        cluster.clock.now += 3600
    assert cluster.run(TIMEOUT_S - 3, without={0, 1, 2, 3}) is None
    cluster.clock.now += 3600
    assert cluster.run(30) is None


@pytest.mark.parametrize("over", [False, True])
def test_a_rank_on_another_machine_that_is_gone_is_named_within_seconds(over: bool) -> None:
    cluster = Cluster(8)
    cluster.watches[5]._over = over
    assert cluster.run(30) is None
    for mate in (4, 6):
        cluster.watches[mate]._peers[5] = peer(5)
        cluster.watches[mate].mates.look = lambda: {5: Sight("gone", "SIGKILL")}  # type: ignore[method-assign]
    verdict = cluster.run(3, without={5})
    assert (verdict and (verdict.rank, verdict.kind)) == (None if over else (5, "killed"))


def test_a_run_ends_well_although_the_store_is_slow() -> None:
    """Each rank tells that it has finished, and the judge leaves last."""
    cluster = Cluster(8, answer_s=3)
    assert cluster.run(30) is None
    left: list[int] = []
    for rank in (3, 1, 2, 0, 4, 5, 6, 7):
        cluster.watches[rank]._over = True
        assert cluster.run(1, without={*left}) is None
        left += [other for other, watch in enumerate(cluster.watches) if watch._over and watch._may_leave(0)]
    for _ in range(15):
        assert cluster.run(1, without={*left}) is None
        left += [rank for rank, watch in enumerate(cluster.watches) if rank not in left and watch._may_leave(0)]
    assert len({*left}) == 8
    assert left[-1] == 0


class Pair:
    """Two watches in this process, with a store of its memory; they note that they would have ended it."""

    def __init__(
        self, *, patience: Patience = DEFAULT, everyone: list[Heartbeat] | None = None, on_gpu: bool = False
    ) -> None:
        store = HashStore()
        prepare(store, run="test", world_size=2)
        self.ended: list[int] = []
        self.watches = [
            Monitor(
                everyone or [first_heartbeat(0), first_heartbeat(1)],
                rank=rank,
                board=HeartbeatStore(store, run="test", rank=rank, world_size=2),
                patience=patience,
                on_gpu=on_gpu,
                store_host=0,
                grace_s=0,
                end=self.ended.append,
            )
            for rank in range(2)
        ]
        self.progress = [watch.progress for watch in self.watches]

    def start(self, *ranks: int) -> "Pair":
        for rank in ranks or (0, 1):
            self.watches[rank].start()
        return self

    def fall_behind(self, *, step: int, idle_s: float = 0.0) -> None:
        """Rank 1, by a phase; both have been in theirs for `idle_s`."""
        for progress, phases in zip(self.progress, ["abab", "aba"], strict=True):
            for phase in phases:
                progress.enter(phase, step=step)
            progress.moment = progress.moment._replace(since=progress.moment.since - idle_s)
            progress._awake_since -= idle_s

    def join(self) -> None:
        for watch in self.watches:
            if watch.ident is not None:
                watch.join(20)
                assert not watch.is_alive()


def test_of_two_failures_both_processes_blame_the_first_and_one_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair().start()
    failing = threading.Thread(target=pair.watches[1].fail, args=("ValueError: first",))
    failing.start()
    while not pair.watches[1]._board._order:  # has it told?
        time.sleep(0.01)
    verdict = pair.watches[0].fail("RuntimeError: connection closed by peer")
    failing.join()
    pair.join()
    assert verdict is not None
    assert (verdict.rank, verdict.kind) == (1, "failed")
    assert "\n  ValueError: first\n" in verdict.message
    assert pair.watches[1].verdict == verdict
    assert pair.ended == [1, 1]
    assert capsys.readouterr().err == f"{verdict.message}\n"


def test_who_leaves_waits_until_its_last_beat_has_arrived(capsys: pytest.CaptureFixture[str]) -> None:
    """The store of a crowded machine answers late; a process that ends before would be taken for killed."""
    pair = Pair().start()
    board = pair.watches[1]._board
    exchange, delays_s = board._exchange, [1.5]

    def answer_late(beat: Heartbeat) -> News:
        if beat.over and delays_s:
            time.sleep(delays_s.pop())
        return exchange(beat)

    board._exchange = answer_late
    pair.watches[1].leave()
    assert not delays_s
    assert Heartbeat.from_json(board._store.get("beat1")).over
    pair.watches[0].leave()
    pair.join()
    assert not pair.ended
    assert not capsys.readouterr().err


def test_the_one_that_does_not_get_on_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair(patience=Patience(2, 2))
    pair.fall_behind(step=4)
    worker = in_fork(lambda: time.sleep(60), daemon=True)
    pair.start().join()
    worker.join(5)
    assert worker.exitcode == -signal.SIGKILL  # as one of a data loader that hangs
    verdict = pair.watches[0].verdict
    assert verdict is not None
    assert (verdict.rank, verdict.kind) == (1, "hung")
    assert "after 4 optimizer steps, phase: a" in verdict.message
    assert __file__ in capsys.readouterr().err  # where the main thread is


def test_one_that_is_late_is_named_once_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair()
    pair.fall_behind(step=4, idle_s=12)
    assert [watch._tick() for _ in range(3) for watch in pair.watches] == [None] * 6
    assert len(re.findall(r"^lit_cifar: rank 1 .* is late: .*\.py:\d+ ", capsys.readouterr().err, re.MULTILINE)) == 1
    for watch in pair.watches:
        watch._board.close()


@pytest.mark.parametrize(
    ("busy", "on_disk", "on_gpu", "hangs"),
    [(False, False, False, True), (False, True, False, False), (True, False, False, False), (True, False, True, True)],
)
def test_one_that_computes_or_waits_for_a_disk_does_not_hang_but_one_that_spins_for_its_gpu(
    busy: bool, on_disk: bool, on_gpu: bool, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "effort", lambda peers: (time.monotonic() * busy, 0.0, on_disk))
    pair = Pair(on_gpu=on_gpu, patience=BRIEF)
    pair.fall_behind(step=0, idle_s=2 * TIMEOUT_S)
    verdicts = [watch._tick() for _ in range(3) for watch in pair.watches]
    assert [verdict and verdict.rank for verdict in verdicts[-2:]] == ([1, 1] if hangs else [None, None])
    for watch in pair.watches:
        watch._board.close()


def test_a_stopped_process_is_named_and_killed(
    child: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    beat = beat_of(child)
    pair = Pair(patience=Patience(2), everyone=[first_heartbeat(0), beat]).start(0)
    child.send_signal(signal.SIGSTOP)
    pair.join()
    assert child.wait(5) == -signal.SIGKILL
    assert f"rank 1 (pid {child.pid} on {beat.host}) is stopped" in capsys.readouterr().err
    assert pair.ended == [1]


@pytest.mark.parametrize(
    ("other", "culprit", "waits"),
    [
        (Sight("gone"), gone(1), False),
        (Sight("stopped"), peer(1, heard_at=79, state="stopped"), False),
        (Sight("running"), peer(1, failure="E", order=1), True),  # the culprit itself wants to know
    ],
)
def test_who_ends_waits_for_others(other: Sight, culprit: Peer, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, slept = Pair().watches[0], []
    watch._peers[1] = replace(watch._peers[1], sight=other)
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(process, "kill", lambda pid, started, ranks: None)
    verdict = verdict_of(peer(0), culprit if other.state != "running" else replace(culprit, answered=True))
    assert verdict is not None
    watch._conclude(verdict)
    assert (2 * BEAT_S in slept) == waits


def test_a_board_does_not_wait_for_a_store_that_does_not_answer() -> None:
    release = threading.Event()

    class Stuck(HashStore):
        def set(self, key: str, value: str) -> None:
            release.wait(10)

    board = HeartbeatStore(HashStore(), run="test", rank=0, world_size=1)
    board._store = Stuck()
    assert board.exchange(first_heartbeat(0), wait_s=0.1) is None
    assert board.exchange(first_heartbeat(0), wait_s=0.1) is None
    assert not board.lost
    release.set()


@pytest.mark.parametrize(
    ("module", "busy", "waits", "works"),
    [
        ("torch.distributed.distributed_c10d", False, True, False),
        ("torch.distributed.distributed_c10d", True, True, False),  # it spins
        ("torch.autograd.graph", False, True, False),
        ("torch.autograd.graph", True, False, True),
        ("lit_cifar.data.loader", False, False, False),
        ("lit_cifar.data.loader", True, False, True),
    ],
)
def test_a_thread_that_waits_for_other_processes_is_told_from_one_that_works_or_hangs(
    module: str, busy: bool, waits: bool, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    found = activity.Activity(peers=(), memory_s=10.0, clock=clock)

    def look(module: str, *, after_s: float, used_s: float) -> tuple[bool, bool]:
        clock.now += after_s
        monkeypatch.setattr(activity, "effort", lambda peers: (used_s, 0.0, False))
        found.look("", module)
        return found.waits, found.works

    assert not look("lit_cifar.data.loader", after_s=0, used_s=50)[1]  # what was used before counts for nothing
    assert look(module, after_s=1, used_s=50.1 if busy else 50.04) == (waits, works)
    # It has just got on, and the process that it had started has ended.
    assert look("lit_cifar.task.module", after_s=1, used_s=40) == (waits, works)
    assert look("lit_cifar.task.module", after_s=10, used_s=40) == (False, False)


@pytest.mark.parametrize(
    ("on_gpu", "moves", "helped", "waits", "works"),
    [
        (True, False, False, True, False),  # in `cudaStreamSynchronize`, behind a stuck collective operation
        (True, True, False, False, True),
        (True, False, True, False, True),  # a helper writes a checkpoint meanwhile
        (False, False, False, False, True),  # backward of a large batch is one call
    ],
)
def test_a_thread_that_spins_for_its_gpu_does_not_work(
    on_gpu: bool, moves: bool, helped: bool, waits: bool, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    found = activity.Activity(peers=(), memory_s=10.0, on_gpu=on_gpu, clock=clock)
    for clock.now in range(20):
        used = 1.0 * clock.now, 0.5 * clock.now * helped, False
        monkeypatch.setattr(activity, "effort", lambda peers, used=used: used)
        found.look(f"line {clock.now if moves else 0}", "torch._tensor")
    assert (found.waits, found.works) == (waits, works)


def test_effort_is_of_the_main_thread_its_helpers_and_children_without_peers() -> None:
    """A helper writes a checkpoint, say; other threads spin while they wait."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while psutil.Process(child.pid).cpu_times().user < 0.2:
            time.sleep(0.05)
        with_child_s, without_s = sum(activity.effort(())[:2]), sum(activity.effort({child.pid})[:2])
        child.kill()
    assert without_s < with_child_s - 0.1
    for name, counts in ((f"{HELPER}_0", True), ("another", False)):
        over = threading.Event()
        thread = threading.Thread(target=lambda over=over: [None for _ in iter(over.is_set, True)], name=name)
        before_s, begin = sum(activity.effort(())[:2]), time.process_time()
        thread.start()
        while time.process_time() < begin + 0.3:
            time.sleep(0.05)
        assert (sum(activity.effort(())[:2]) > before_s + 0.15) == counts
        over.set()
        thread.join()
    before_s, begin = sum(activity.effort(())[:2]), time.thread_time()
    while time.thread_time() - begin < 0.3:
        pass
    assert sum(activity.effort(())[:2]) - before_s > 0.1


def test_the_hooks_note_phase_step_and_shape() -> None:
    assert all(callable(getattr(L.Callback, name)) for name in PHASES)
    callback, trainer = Watchdog(), SimpleNamespace(global_step=3)
    progress = PhaseTimer()
    callback._watch = cast(Any, SimpleNamespace(progress=progress))
    batch = Batch(torch.empty(5, 3, 2, 2), torch.empty(5), torch.arange(5), 1.0)
    hooks: Any = callback
    hooks.on_train_batch_start(trainer, None, batch, 0)
    assert (progress.moment.phase, progress.moment.step, progress.moment.shape) == ("training step", 3, (5, 3, 2, 2))
    hooks.on_before_backward(trainer, None, torch.empty(()))
    assert (progress.moment.phase, progress.moment.shape) == ("backward", (5, 3, 2, 2))
    hooks.on_validation_batch_start(trainer, None, batch._replace(images=torch.empty(1, 3, 2, 2)), 0, dataloader_idx=0)
    assert progress.moment.shape == (1, 3, 2, 2)


def test_with_a_time_of_zero_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    callback = Watchdog(timeout_s=0)
    callback.setup(cast(Any, SimpleNamespace(world_size=2)), L.LightningModule(), "fit")
    assert callback._watch is None
    for too_short_s in (-1.0, 1.0, math.nan):  # there may be no beat in this time
        with pytest.raises(ConfigError, match="is too short"):
            Watchdog(timeout_s=too_short_s)
        with pytest.raises(ConfigError, match=r"hang_timeout_s=.* is too short"):
            Watchdog(hang_timeout_s=too_short_s)
    with pytest.raises(ConfigError, match="hang_timeout_s=60 of the watchdog has no effect"):
        Watchdog(timeout_s=0, hang_timeout_s=60)


def test_a_process_ends_after_the_one_that_started_it() -> None:
    """Who started it is noted before torch is imported, which takes long."""
    imports = re.findall(r"^(?:from|import) (\w+)\S*", Path(lit_cifar.__file__).read_text(), flags=re.MULTILINE)
    assert not {"torch", "lightning"} & set(imports)
    assert lit_cifar.startup is startup
    follower = (
        f"import os, runpy, time; startup = runpy.run_path({startup.__file__!r}); "
        "follow = startup['exit_with_parent']; follow.__wrapped__.__globals__['_GRACE_S'] = 0; follow(); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    starter = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {follower!r}])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", starter], stdout=pipe, stderr=pipe, text=True) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        child = psutil.Process(int(run.stdout.readline()))
        run.kill()
        assert f"pid {child.pid} stops: pid {run.pid}, which started it, is gone" in run.stderr.readline()
        psutil.wait_procs([child], timeout=5)
        assert not is_running(child)


@pytest.mark.parametrize("by_shell", [True, False])
def test_a_rank_outlasts_the_shell_in_which_it_was_started(by_shell: bool) -> None:
    """And not a process of which it is a copy, as those of Lightning's launcher are."""
    copy = [sys.executable, "-c", "import lit_cifar; print(lit_cifar.startup.STARTED_BY_COPY)"]
    command = ["sh", "-c", '"$@"; true', "sh", *copy] if by_shell else copy
    starter = f"import lit_cifar, subprocess; subprocess.run({command!r})"
    run = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True, check=True)
    assert run.stdout == f"{not by_shell}\n"


@pytest.mark.parametrize("is_copy", [True, False])
def test_only_a_copy_of_a_rank_follows_it(is_copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[None] = []
    monkeypatch.setattr(startup, "STARTED_BY_COPY", is_copy)
    monkeypatch.setattr(startup, "exit_with_parent", lambda: followed.append(None))
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_only.rank", 1)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert len(followed) == is_copy
    strategy = DDPStrategy(cluster_environment=LightningEnvironment())
    strategy._launcher = internals.SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    assert launched_by_lightning(cast(Any, SimpleNamespace(strategy=strategy, local_rank=1))) == is_copy


@pytest.mark.parametrize("launched", [True, False])
def test_only_a_rank_whose_launcher_waits_ends_at_once(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own process has other things to do at its end."""
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: launched)
    watchdog, trainer = Watchdog(), cast(Any, SimpleNamespace(global_rank=0, strategy=SimpleNamespace(launcher=None)))
    watchdog._watch = cast(Any, SimpleNamespace(fail=lambda failure, quiet: SimpleNamespace(rank=1)))
    watchdog.on_exception(trainer, cast(Any, None), RuntimeError("another rank has closed its connection"))
    assert len(at_exit) == launched


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_process_whose_starter_lives_goes_on(method: str) -> None:
    """The kernel's parent of the last is a fork server."""
    process = multiprocessing.get_context(method).Process(target=startup.exit_with_parent)
    process.start()
    process.join(60)
    assert process.exitcode == 0
