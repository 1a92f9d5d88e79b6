"""Nobody outside this machine can reach a run on it, and a port that is taken stops none."""

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import TINY
from recorder import global_steps
from torch.distributed import TCPStore

from lit_cifar.errors import ConfigError
from lit_cifar.launch import rendezvous
from lit_cifar.launch.network_interfaces import LOOPBACK
from lit_cifar.launch.rendezvous import LocalEnvironment, TorchrunEnvironment, open_store

CHECKOUT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
STARTS = {
    "ddp": ([sys.executable, "-m", "lit_cifar"], ["--trainer.strategy=ddp", "--trainer.devices=2"]),
    "ddp_spawn": ([sys.executable, "-m", "lit_cifar"], ["--trainer.strategy=ddp_spawn", "--trainer.devices=2"]),
    "torchrun": ([*TORCHRUN, "--standalone", "-m", "lit_cifar"], ["--trainer.strategy=ddp"]),
    "torchrun with a file": (
        [*TORCHRUN, "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "-m", "lit_cifar"],
        ["--trainer.strategy=ddp"],
    ),
}


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port of the loopback interface at which somebody else listens."""
    with socket.create_server((LOOPBACK, 0)) as other:
        yield other.getsockname()[1]


def addresses(process: psutil.Process) -> set[str]:
    """Where a process listens."""
    found = process.net_connections("inet")
    return {port.laddr.ip for port in found if port.status == psutil.CONN_LISTEN}


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_a_running_job_listens_on_the_loopback_interface_only(name: str, taken_port: int, tmp_path: Path) -> None:
    """All of its processes; but for torchrun itself, of which the last case shows how to have it listen nowhere."""
    command, flags = STARTS[name]
    record = ["--trainer.callbacks+=recorder.RecordIds", f"--trainer.callbacks.folder={tmp_path}"]
    slow = ["--trainer.callbacks+=stopping.SlowSteps", "--trainer.callbacks.seconds=1"]
    settings = {"MASTER_PORT": str(taken_port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "nowhere0"}
    if name == "torchrun with a file":
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [*command, "fit", *TINY, *flags, *record, *slow],
            env={**os.environ, **settings, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests'}"},
            cwd=tmp_path,
            stdout=log,
            stderr=log,
        )
    first = psutil.Process(job.pid)
    try:
        while len([step for step in global_steps(tmp_path) if step[1] >= 1]) == 0:
            assert job.poll() is None, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.2)
        below = {process.pid: addresses(process) for process in first.children(recursive=True)}
        own = addresses(first)
    finally:
        for process in (*first.children(recursive=True), first):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        job.wait()
    listening = [found for found in below.values() if found]
    assert listening
    assert all(found == {LOOPBACK} for found in listening)
    # torchrun opens its own ports before a line of ours runs.
    assert own == ({"::"} if name == "torchrun" else set() if name == "torchrun with a file" else {LOOPBACK})


def test_a_store_listens_where_it_is_told() -> None:
    before = addresses(psutil.Process())
    store = open_store(LOOPBACK)
    assert addresses(psutil.Process()) - before <= {LOOPBACK}
    with pytest.raises(ConnectionRefusedError):  # at another address of this machine: all of 127/8 are its own
        socket.create_connection(("127.0.0.2", store.port), timeout=1)
    socket.create_connection((LOOPBACK, store.port), timeout=1).close()


def test_a_port_in_use_is_replaced_or_refused(taken_port: int) -> None:
    assert open_store(LOOPBACK, port=taken_port).port != taken_port
    with pytest.raises(ConfigError, match=f"cannot meet at {LOOPBACK}:{taken_port}"):
        open_store(LOOPBACK, port=taken_port, only_there=True)


def test_lightnings_processes_meet_at_another_port_which_is_held(
    taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From when it is chosen; one that was launched goes where it was told."""
    monkeypatch.setenv("MASTER_PORT", str(taken_port))
    environment = LocalEnvironment()
    port = environment.main_port
    assert taken_port != port == environment.main_port
    with pytest.raises(OSError, match="in use"):
        socket.create_server((LOOPBACK, port))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert LocalEnvironment().main_port == taken_port


def test_a_spawned_process_is_a_client_of_its_parents_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")
    parent = LocalEnvironment()
    port = parent.main_port
    assert parent.main_address == LOOPBACK
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == ""
    child = pickle.loads(pickle.dumps(parent))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert (child.main_address, child.main_port) == (LOOPBACK, port)
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of torchrun's agent, and what the agent tells the processes of one machine."""
    store = open_store(LOOPBACK)
    sizes = {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    place = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**sizes, **place, "GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}.items():
        monkeypatch.setenv(name, value)
    return store


def test_processes_of_torchrun_find_the_new_rank_0(agent: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the agent's store still holds is the place of a dead one."""
    with socket.create_server((LOOPBACK, 0)) as dead:
        agent.set("lit_cifar/place", f"{LOOPBACK} {dead.getsockname()[1]} token")
    monkeypatch.setenv("RANK", "1")
    second, found = TorchrunEnvironment(), []
    waiting = threading.Thread(target=lambda: found.append(second.main_port))
    waiting.start()
    time.sleep(0.5)
    assert not found
    monkeypatch.setenv("RANK", "0")
    first = TorchrunEnvironment()
    port = first.main_port
    waiting.join(10)
    assert found == [port]
    assert port != agent.port
    assert first.main_address == second.main_address == LOOPBACK


def test_a_store_of_somebody_else_is_not_taken_for_rank_0s(agent: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.set("lit_cifar/place", f"{LOOPBACK} {agent.port} token")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(rendezvous, "_MEETING_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError, match=r"rank 0 did not open its store within 0.5 s"):
        _ = TorchrunEnvironment().main_port


def test_without_the_agents_store_rank_0_opens_one_at_the_chosen_port(
    agent: TCPStore, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("MASTER_ADDR", "a-name-that-torchrun-gives")
    with pytest.raises(ConfigError, match="start them again"):
        _ = TorchrunEnvironment().main_port
    with socket.create_server((LOOPBACK, 0)) as probe:  # which is free a moment later
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    environment = TorchrunEnvironment()
    assert (environment.main_address, str(environment.main_port)) == (LOOPBACK, os.environ["MASTER_PORT"])
