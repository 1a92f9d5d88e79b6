"""The watchdog's verdicts as a table; two watches in one process; and the progress of the main thread."""

import math
import multiprocessing
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import psutil
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from processes import is_running
from tiny_task import TinyData, TinyTask, tiny_trainer
from torch import Tensor
from torch.distributed import HashStore

import lit_cifar
from lit_cifar import internals
from lit_cifar.checks.watchdog import heartbeat as process
from lit_cifar.checks.watchdog import monitor, progress
from lit_cifar.checks.watchdog.callback import Watchdog, _count
from lit_cifar.checks.watchdog.diagnosis import NOBODY, Patience, Peer, Verdict, diagnose, diagnose_judge, updated
from lit_cifar.checks.watchdog.heartbeat import Heartbeat, Sight, this_process
from lit_cifar.checks.watchdog.monitor import BEAT_S, Monitor
from lit_cifar.checks.watchdog.progress import Progress
from lit_cifar.checks.watchdog.store import HeartbeatStore, prepare
from lit_cifar.cli.main import main
from lit_cifar.errors import ConfigError, Stopped
from lit_cifar.launch import startup
from lit_cifar.launch.signals import launched_by_lightning

TIMEOUT_S = 20.0
DEFAULT = Patience(TIMEOUT_S)
BRIEF = DEFAULT._replace(hung_s=TIMEOUT_S)  # as with --watchdog.hang_timeout_s


def beat_of(rank: int, host: str = "a", **rest: Any) -> Heartbeat:
    return Heartbeat(rank=rank, pid=1000 + rank, started="1", host=host, **rest)


def peer(rank: int, state: str = "running", ending: str = "", *, heard_at: float = 100.0, **rest: Any) -> Peer:
    answered = rest.pop("answered", False)
    beat = beat_of(rank, number=1, **rest)
    return Peer(beat=beat, heard_at=heard_at, sight=Sight(state, ending), answered=answered)


def gone(rank: int, ending: str = "", **rest: Any) -> Peer:
    return peer(rank, "gone", ending, **rest)


def verdict_of(*peers: Peer, patience: Patience = BRIEF) -> Verdict | None:
    return diagnose({peer.rank: peer for peer in peers}, now=100.0, patience=patience)


NO_VERDICT = [
    (peer(0), peer(1, heard_at=80.5)),  # silent, but not for long
    (peer(0), peer(1, state="stopped")),  # it may go on
    (peer(0), gone(1, over=True)),  # finished earlier
    (peer(0, over=True), peer(1, over=True)),
    (peer(0, idle_s=90), peer(1, idle_s=3)),  # waits for one that gets on
    (peer(0, idle_s=90), peer(1, over=True, heard_at=90)),  # it ended its waiting, as will be told
    # Aborted, perhaps because of another process: what has become of the others is not known yet.
    (peer(0), gone(1, "SIGABRT"), peer(2, heard_at=95, state="unseen")),
    (peer(0, failure="E", order=1), peer(1)),  # the other has not answered yet: it may be the cause
    (peer(0, failure="E", order=1), peer(1, heard_at=95)),
]
CULPRITS = [
    (1, "killed", peer(0), gone(1)),
    # Who is killed takes the others along: NCCL aborts those that survive, launchers terminate them.
    (2, "killed", peer(0), gone(1, "SIGABRT"), gone(2, "SIGKILL")),
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
    (1, "failed", peer(0, failure="closed", order=2), peer(1, failure="E", order=1)),
    (1, "failed", peer(0, idle_s=1800, answered=True), peer(1, idle_s=1800, failure="Timed out", order=1)),
    # No rank gets on, and those that have finished did so long ago.
    (NOBODY, "hung", peer(0, idle_s=30), peer(1, idle_s=21)),
    (NOBODY, "hung", peer(0, over=True, heard_at=79), peer(1, idle_s=30), peer(2, idle_s=30)),
]


def told(verdict: Verdict | None) -> tuple[int, str, int] | None:
    """Whom it blames, for what, and who says so."""
    return verdict and (verdict.rank, verdict.kind, verdict.reporter)


@pytest.mark.parametrize(
    ("peers", "expected"),
    [*((peers, None) for peers in NO_VERDICT), *((peers, (rank, kind, 0)) for rank, kind, *peers in CULPRITS)],
)
def test_the_judge_says_who_is_to_blame(peers: list[Peer], expected: tuple[int, str, int] | None) -> None:
    assert told(verdict_of(*peers)) == expected
    if expected is None or expected[1] == "hung":  # no run is ended for a hang, unless the user says so
        assert verdict_of(*peers, patience=DEFAULT) is None


def test_a_message_names_the_place_of_the_culprit_and_of_all_that_do_not_get_on() -> None:
    waits = {"idle_s": 30.0, "place": "b.py:2 (all_reduce)"}
    peers = [peer(0, **waits), peer(1, idle_s=30.0, place="a.py:1 (f)"), peer(2, **waits)]
    stands = "  rank 1 (pid 1001 on a) has been for 30 s at a.py:1 (f)\n"
    stands += "  rank 0 (pid 1000 on a) (and rank 2) has been for 30 s at b.py:2 (all_reduce)"
    hung = verdict_of(*peers)
    killed = verdict_of(*peers, gone(3, "SIGKILL", place="c.py", step=7))
    assert hung.message == f"lit_cifar: no rank has got on for 30 s\n{stands}\nlit_cifar: all processes stop"
    assert re.match(r"lit_cifar: rank 3 .*SIGKILL.*; after 7 optimizer steps, at c.py\n  rank 1", killed.message)


@pytest.mark.parametrize("silent", [0, 2])
def test_a_process_that_is_silent_and_seen_to_run_is_not_lost(silent: int) -> None:
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
    table = {peer.rank: peer for peer in peers}
    assert told(diagnose_judge(table, me=max(table), now=100.0, patience=DEFAULT)) == expected


def test_an_answer_is_a_beat_that_was_heard_after_the_failure_or_the_end_of_another() -> None:
    own_failure = replace(peer(0).beat, failure="E", number=2)
    for told, seen in (([own_failure], {}), ([], {0: Sight("gone")})):
        beat = peer(1).beat
        peers = updated({0: peer(0), 1: peer(1)}, [*told, replace(beat, number=2)], seen, now=101.0)
        assert not peers[1].answered  # written before, perhaps
        peers = updated(peers, [replace(beat, number=2)], {}, now=102.0)
        assert (peers[1].answered, peers[1].heard_at) == (False, 101.0)
        peers = updated(peers, [replace(beat, number=3)], {1: Sight("stopped")}, now=103.0)
        assert (peers[1].answered, peers[1].sight.state) == (True, "stopped")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeping:
        yield sleeping
        sleeping.kill()


def test_processes_are_seen_to_stop_and_to_end(child: subprocess.Popen[bytes]) -> None:
    """Rank 2 is in another network: its machine may be lost while it runs."""
    started, own = process.start_time(child.pid), this_process(0)
    first = replace(own, rank=1, pid=child.pid, started=started)
    mates = process.Mates([own, first, replace(first, rank=2, network="net:[1]")], own)
    assert mates.look() == {1: Sight("running")}
    assert process.look_at(child.pid, started + "0") == Sight("gone")  # another one with the same pid
    child.send_signal(signal.SIGSTOP)
    while mates.look()[1] != Sight("stopped"):
        time.sleep(0.01)
    mates.kill(3)
    assert mates.look()[1] == Sight("stopped")
    mates.kill(1)
    while mates.look()[1] != Sight("gone", "SIGKILL"):
        time.sleep(0.01)
    child.wait()
    assert mates.look() == {1: Sight("gone", "SIGKILL")}
    mates.kill(1)
    assert process.look_at(child.pid, started) == Sight("gone")
    assert [process.ending(code) for code in (3, -99)] == ["exit status 3", "signal 99"]


class Clock:
    """Stands until told otherwise."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class LateStore(HeartbeatStore):
    """Answers `late_s` after it was asked, by a clock that stands."""

    def __init__(self, store: HashStore, clock: Any, late_s: float, *, rank: int, world_size: int) -> None:
        super().__init__(store, rank=rank, world_size=world_size)
        self._clock, self.late_s = clock, late_s
        self._asked: tuple[float, Heartbeat] | None = None

    def exchange(self, beat: Heartbeat, *, wait_s: float) -> list[Heartbeat]:
        asked_at, asked = self._asked = self._asked or (self._clock(), beat)
        if self._clock() < asked_at + self.late_s:
            return []
        self._asked = None
        return self._exchange(asked)


class Cluster:
    """Watches of many ranks, each on a machine of its own, in a time that passes when it is told to, or by `clock`."""

    def __init__(self, num_ranks: int, *, answer_s: float = 0, patience: Patience = DEFAULT, clock: Any = None) -> None:
        self.clock, store = clock or Clock(), HashStore()
        self.num_batches = 0
        prepare(store, world_size=num_ranks)
        everyone = [beat_of(rank, f"node{rank}") for rank in range(num_ranks)]
        progress = Progress(lambda: (1, self.num_batches))
        of = partial(LateStore, store, self.clock, answer_s, world_size=num_ranks)
        self.boards = [of(rank=rank) for rank in range(num_ranks)]
        self.watches = [
            Monitor(everyone, rank=rank, board=board, patience=patience, progress=progress, clock=self.clock)
            for rank, board in enumerate(self.boards)
        ]

    def run(self, for_s: float, *, every_s: float = BEAT_S, without: set[int] = frozenset()) -> Verdict | None:
        """The first verdict within this time, in which the other ranks get on, or none."""
        end = self.clock.now + for_s
        while self.clock.now < end:
            for rank, watch in enumerate(self.watches):
                self.num_batches += 1
                if rank not in without and (verdict := watch._tick()) is not None:
                    return verdict
            self.clock.now += every_s
        return None

    def start(self) -> None:
        """Let them watch in threads."""
        for watch in self.watches:
            watch.start()

    def join(self) -> None:
        for watch in self.watches:
            watch.join(20)
            assert not watch.is_alive()


@pytest.mark.parametrize(("answer_s", "within_s"), [(0, TIMEOUT_S + 3), (0.5, 2 * TIMEOUT_S + 5)])
@pytest.mark.parametrize("silent", [3, 0])
def test_a_rank_that_is_silent_is_named(silent: int, answer_s: float, within_s: float) -> None:
    cluster = Cluster(8, answer_s=answer_s)
    assert cluster.run(100) is None
    assert cluster.run(TIMEOUT_S - 1, without={silent}) is None
    verdict = cluster.run(within_s - TIMEOUT_S + 1, without={silent})
    assert (told(verdict) or ())[:2] == (silent, "silent")


def test_a_store_without_answers_is_the_silence_of_the_judge() -> None:
    cluster = Cluster(4)
    assert cluster.run(30) is None
    for board in cluster.boards:
        board.late_s = math.inf
    assert cluster.run(TIMEOUT_S - 1) is None
    assert (told(cluster.run(100)) or ())[:2] == (0, "silent")


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


def test_a_machine_that_is_gone_is_named_although_its_ranks_saw_each_other() -> None:
    cluster = Cluster(8)
    for rank, mate in ((6, 7), (7, 6)):
        cluster.watches[rank].mates.look = partial(dict, {mate: Sight("running")})  # type: ignore[method-assign]
    assert cluster.run(30) is None
    assert (told(cluster.run(TIMEOUT_S + 3, without={6, 7})) or ())[:2] == (6, "silent")


@pytest.mark.parametrize("end", [Stopped(143), KeyboardInterrupt(), SIGTERMException()])
def test_who_is_stopped_has_not_failed(end: BaseException) -> None:
    watchdog, said = Watchdog(), list[str]()
    watchdog._watch = SimpleNamespace(fail=said.append, leave=lambda: said.append("left"))  # type: ignore[assignment]
    watchdog.on_exception(SimpleNamespace(global_rank=0), None, end)  # type: ignore[arg-type]
    assert said == ["left"]


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


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which watches in this process would have ended it."""
    statuses: list[int] = []
    monkeypatch.setattr(monitor, "GRACE_S", 0)
    monkeypatch.setattr(monitor, "os", SimpleNamespace(_exit=statuses.append))
    return statuses


@pytest.mark.parametrize("first", [0, 1])
def test_both_ranks_blame_the_first_failure(first: int, ended: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    pair = Cluster(2, clock=time.monotonic)
    pair.start()
    failing = threading.Thread(target=pair.watches[first].fail, args=("ValueError: first",))
    failing.start()
    while not pair.watches[first]._board._order:  # has it told?
        time.sleep(0.01)
    verdict = pair.watches[1 - first].fail("RuntimeError: connection closed by peer")
    failing.join()
    pair.join()
    assert (verdict.rank, verdict.kind) == (first, "failed")
    assert "\n  ValueError: first\n" in verdict.message
    assert pair.watches[first].verdict == verdict
    assert ended == [1, 1]
    assert capsys.readouterr().err == f"{verdict.message}\n"


@pytest.mark.usefixtures("ended")
def test_where_none_gets_on_all_end_with_their_workers(capsys: pytest.CaptureFixture[str]) -> None:
    pair = Cluster(2, patience=Patience(2, 2), clock=time.monotonic)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    pair.start()
    pair.join()
    worker.join(5)
    assert worker.exitcode == -signal.SIGKILL  # as one of a data loader that hangs
    verdict = pair.watches[0].verdict
    assert (verdict.rank, verdict.kind) == (NOBODY, "hung")
    assert __file__ in capsys.readouterr().err  # where the main thread is


def test_a_board_does_not_wait_for_a_store_that_does_not_answer() -> None:
    release = threading.Event()

    class Stuck(HashStore):
        def set(self, key: str, value: str) -> None:
            release.wait(10)

    board = HeartbeatStore(Stuck(), rank=0, world_size=1)
    for _ in range(2):
        assert board.exchange(beat_of(0), wait_s=0.1) == []
    assert not board.lost
    release.set()


def test_who_comes_to_another_line_or_another_batch_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [0]
    watched = Progress(lambda: (7, batches[0]))
    for line, batch, idle_s in ((1, 0, 0.0), (1, 0, 1.5), (1, 0, 3.0), (2, 0, 0.0), (2, 1, 0.0), (2, 1, 1.5)):
        frames = [FrameSummary("train.py", line, "f")]
        monkeypatch.setattr(progress, "_frames_of", lambda thread_id, frames=frames: frames)
        batches[0] = batch
        watched.look(1.5)
        assert watched.idle_s == idle_s


def test_every_batch_of_every_command_counts(tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    class Counted(TinyTask):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(_count(self.trainer))
            return super().forward(images)

    trainer, task = tiny_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0), Counted()
    trainer.fit(task, TinyData())
    for command in (trainer.validate, trainer.test, trainer.predict):
        command(task, TinyData())
    assert [steps for steps, *_ in seen[:12]] == [0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 6, 6]
    assert len({*seen}) == len(seen) == 21


def test_with_a_time_of_zero_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    callback = Watchdog(timeout_s=0)
    callback.setup(cast(Any, SimpleNamespace(world_size=2)), L.LightningModule(), "fit")
    assert callback._watch is None
    with pytest.raises(ConfigError, match="hang_timeout_s=60 has no effect"):
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


@pytest.mark.xdist_group("test_workers")  # where the fork server is
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_process_whose_starter_lives_goes_on(method: str) -> None:
    """The kernel's parent of the last is a fork server."""
    process = multiprocessing.get_context(method).Process(target=startup.exit_with_parent)
    process.start()
    process.join(60)
    assert process.exitcode == 0
