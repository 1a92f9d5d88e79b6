"""`fit --max_restarts`: ranks are forked, forked again when one is lost, and end as the user asks."""

import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from commands import TINY, callback, graded, launch, mode_flags
from processes import is_running

import lit_cifar.strategies  # noqa: F401  # registers their names
from lit_cifar.cli.main import CLI
from lit_cifar.errors import ConfigError
from lit_cifar.launch.forked import ForkedRun
from lit_cifar.launch.network_interfaces import LOOPBACK
from lit_cifar.launch.rendezvous import count_processes
from lit_cifar.launch.restarts import ForkedRanks
from lit_cifar.launch.signals import EXIT_STOPPED
from lit_cifar.strategies.mp import DDPLayerParallelStrategy
from lit_cifar.tools.chaos.audit import metric_problems
from lit_cifar.tools.chaos.job import _rank_of, wait_until


@pytest.mark.parametrize(
    ("strategy", "devices", "num_processes"),
    [("ddp", 3, 3), ("pp", "2", 2), ("tp", [0, 1], 2), ("auto", 1, 1), (DDPLayerParallelStrategy(num_stages=2), 4, 2)],
)
def test_processes_are_counted_before_there_are_any(strategy: Any, devices: Any, num_processes: int) -> None:
    assert count_processes({"strategy": strategy, "devices": devices, "num_nodes": 1}) == num_processes


@pytest.mark.parametrize(
    ("strategy", "devices", "num_nodes"),
    [("ddp", "auto", 1), ("ddp", -1, 1), ("ddp_mp", 3, 1), ("dp", 2, 1), ("ddp_spawn", 2, 1), ("ddp", 2, 2)],
)
def test_what_cannot_be_counted_or_forked_is_refused(strategy: str, devices: Any, num_nodes: int) -> None:
    with pytest.raises(ConfigError, match="--max_restarts"):
        count_processes({"strategy": strategy, "devices": devices, "num_nodes": num_nodes})


PROGRAM = """\
import os, signal, sys, time
from lit_cifar.launch import restarts as launching
launching._FAREWELL_S = 1000.0  # who is asked to end does so at once
launching.ForkedRanks(max_restarts=2).fork(NUM_RANKS, lambda number: number % 2 == 0)
rank, restarts = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
def say():
    print(rank, restarts, os.getpid(), os.environ["MASTER_PORT"], flush=True)
say()
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
WAIT = "time.sleep(600)"


def start(folder: Path, *lines: str, num_ranks: int = 2) -> ForkedRun:
    """`PROGRAM` and then `lines`, in a process whose ranks print to the file `out`."""
    (folder / "program.py").write_text(PROGRAM.replace("NUM_RANKS", str(num_ranks)) + "\n".join(lines) + "\n")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return ForkedRun([], environment=environment, module="program", stdout=folder / "out", stderr=folder / "err")


def starts(folder: Path) -> list[tuple[int, ...]]:
    """Rank, number of restarts, pid and port, of all that have been started."""
    lines = (folder / "out").read_text().splitlines() if (folder / "out").exists() else []
    return sorted(tuple(map(int, line.split())) for line in lines)


@pytest.mark.parametrize(
    ("lines", "status", "restarts"),
    [
        ([], 0, 0),
        ([f"if rank == 1 and restarts < 2: {KILL}", f"if restarts < 2: {WAIT}"], 0, 2),  # each start ends the other one
        ([f"if rank == 0: {KILL}", WAIT], 128 + signal.SIGKILL, 2),
        (["if rank == 1: sys.exit(2)", WAIT], 2, 0),  # the user's mistake will be one again
        ([f"if rank == 1: sys.exit({EXIT_STOPPED})", WAIT], EXIT_STOPPED, 0),  # one was asked, and all have saved
        (["if rank == 0: raise RuntimeError('of rank 0')", WAIT], 1, 2),
    ],
)
def test_ranks_start_again_until_they_end_well(lines: list[str], status: int, restarts: int, tmp_path: Path) -> None:
    run = start(tmp_path, *lines)
    assert run.wait(50) == status
    found = starts(tmp_path)
    assert {count for _, count, *_ in found} == set(range(restarts + 1))
    assert len(found) == len({(rank, count) for rank, count, *_ in found})
    assert len({(count, port) for _, count, _, port in found}) == restarts + 1  # ranks of a start meet at one port
    errors = (tmp_path / "err").read_text()
    assert errors.count("after a failure") == restarts
    assert errors.count("RuntimeError: of rank 0") == (3 if status == 1 else 0)
    assert not any(psutil.pid_exists(pid) for _, _, pid, _ in found)


@pytest.mark.parametrize(("excluded", "left"), [([1], 4), ([1, 3], 2), ([0, 1, 2, 3], 4)])
def test_ranks_are_left_out_if_an_even_number_remains(excluded: list[int], left: int, tmp_path: Path) -> None:
    leaves = f"if restarts == 0: [launching.exclude(rank) for rank in {excluded}]; sys.exit(1)"
    assert start(tmp_path, leaves, num_ranks=4).wait(50) == 0
    assert [rank for rank, restarts, *_ in starts(tmp_path) if restarts == 1] == [*range(left)]
    told = "ranks cannot share the batch, so all start again" in (tmp_path / "err").read_text()
    assert told == (left == 4)


def test_a_request_to_stop_reaches_every_rank_and_is_no_failure(tmp_path: Path) -> None:
    run = start(tmp_path, f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({EXIT_STOPPED}))", "say()", WAIT)
    assert wait_until(lambda: len(starts(tmp_path)) == 4, limit_s=50, poll_s=0.1)  # each has said so twice
    assert [_rank_of(psutil.Process(pid)) for _, _, pid, _ in starts(tmp_path)] == [0, 0, 1, 1]
    run.terminate()
    assert run.wait(20) == EXIT_STOPPED
    assert "after a failure" not in (tmp_path / "err").read_text()


def test_no_rank_outlives_the_process_that_has_forked_it(tmp_path: Path) -> None:
    """Nor holds the lock of its run folder, by which the same command would be refused. It may be stopped itself."""
    run = start(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    assert wait_until(lambda: len(starts(tmp_path)) == 2, limit_s=50, poll_s=0.1)
    ranks = [psutil.Process(pid) for _, _, pid, _ in starts(tmp_path)]
    os.kill(run.pids[0], signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_running, ranks)), limit_s=30, poll_s=0.1)
    run.kill()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", graded(slow=["ddp"], exhaustive=["pp", "fsdp2", "tp"]))
def test_a_killed_rank_costs_no_sample(mode: str, tmp_path: Path) -> None:
    """It is killed after step 4, in each start but the last one: the checkpoint before that is of step 3."""
    killing = callback("stopping.SignalAfter", step=4, rank=1, number=int(signal.SIGKILL), starts=2)
    ends = {}
    for name, own in {
        "undisturbed": [],
        "killed": ["--max_restarts=2", "--resume=auto", *killing],
    }.items():
        run = tmp_path / name
        flags = [*TINY, *mode_flags(mode), "--last_checkpoint.every_n_steps=3", f"--run_dir={run}", *own]
        done = launch("fit", *flags, timeout_s=180)
        assert done.stderr.count("has ended with SIGKILL") == (2 if own else 0)
        assert done.stdout.count("result ") == 1
        ends[name] = (run / "weights.sha256").read_text().splitlines()[-1], (run / "sample_audit.csv").read_text()
    assert ends["killed"] == ends["undisturbed"]
    assert metric_problems(*(tmp_path / name / "metrics.csv" for name in ends)) == []  # each step once
    assert "max_restarts: 0" in (tmp_path / "killed" / "config.yaml").read_text()


def test_ranks_wait_for_the_first_one_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ForkedRanks(max_restarts=1)
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))  # and refuses
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        monkeypatch.setenv("RANK", "0")
        ranks.await_first()
        monkeypatch.setenv("RANK", "1")
        waiting = threading.Thread(target=ranks.await_first)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        listener.listen()
        waiting.join()


@pytest.mark.parametrize(
    ("accelerator", "devices", "left"),
    [("auto", "1,2", [2]), ("gpu", "1,2,", [2]), ("gpu", [1, 2], [2]), ("cpu", 2, 1)],
)
def test_what_is_left_of_named_devices_are_those(
    accelerator: str, devices: Any, left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first of two GPUs computes wrong."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    data = SimpleNamespace(prepare_data=lambda: None, setup=lambda stage: None)
    cli: Any = SimpleNamespace(datamodule=data, _subcommand="fit", _can_train=print, _parse_ckpt_path=lambda: None)
    cli.config_init, cli._arguments = {"fit": SimpleNamespace()}, SimpleNamespace(ckpt_path=None)
    config = {"strategy": "ddp", "accelerator": accelerator, "devices": devices, "num_nodes": 1}
    CLI._fork(cli, config, SimpleNamespace(fork=lambda *_: [1]))  # type: ignore[arg-type]
    assert config["devices"] == left
