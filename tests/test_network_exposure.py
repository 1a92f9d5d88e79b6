"""Where the processes of a run meet: nobody outside this machine can reach them, and a Trainer knows their number."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import TINY, callback, mode_flags
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from recorder import has_reached
from torch.distributed import TCPStore

from lit_cifar.errors import ConfigError
from lit_cifar.launch.rendezvous import LOOPBACK, LocalEnvironment, open_store
from lit_cifar.launch.torchrun import TorchrunEnvironment
from lit_cifar.launch.world_size import resolve_world_size
from lit_cifar.strategies import DDPLayerParallelStrategy, ProcessSyncBatchNorm

CHECKOUT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
DDP = ["--trainer.strategy=ddp"]
STARTS = {
    **{mode: ([sys.executable, "-m", "lit_cifar"], mode_flags(mode)) for mode in ("ddp", "ddp_spawn")},
    "torchrun": ([*TORCHRUN, "--standalone", "-m", "lit_cifar"], DDP),
    "torchrun with a file": ([*TORCHRUN, "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "-m", "lit_cifar"], DDP),
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
    record = callback("recorder.RecordIds", folder=tmp_path)
    slow = callback("stopping.SlowSteps", seconds=1)
    settings = {"MASTER_PORT": str(taken_port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "nowhere0"}
    if name == "torchrun with a file":
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    words = [*command, "fit", *TINY, *flags, *record, *slow]
    environment = {**os.environ, **settings, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests'}"}
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(words, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    first = psutil.Process(job.pid)
    try:
        while not has_reached(tmp_path, 1):
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


def test_a_store_listens_where_it_is_told(taken_port: int) -> None:
    before = addresses(psutil.Process())
    store = open_store(LOOPBACK)
    assert addresses(psutil.Process()) - before <= {LOOPBACK}
    with pytest.raises(ConnectionRefusedError):  # at another address of this machine: all of 127/8 are its own
        socket.create_connection(("127.0.0.2", store.port), timeout=1)
    socket.create_connection((LOOPBACK, store.port), timeout=1).close()
    # A port in use is replaced or refused.
    assert open_store(LOOPBACK, port=taken_port).port != taken_port
    with pytest.raises(ConfigError, match=f"cannot meet at {LOOPBACK}:{taken_port}"):
        open_store(LOOPBACK, port=taken_port, only_there=True)


def test_lightnings_processes_meet_at_a_port_that_is_held(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From when it is chosen; one that was launched goes where it was told."""
    monkeypatch.setenv("MASTER_PORT", str(taken_port))
    environment = LocalEnvironment()
    port = environment.main_port
    assert taken_port != port == environment.main_port
    with pytest.raises(OSError, match="in use"):
        socket.create_server((LOOPBACK, port))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert LocalEnvironment().main_port == taken_port


def test_all_ranks_name_the_one_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    ranks = [LocalEnvironment() for _ in range(2)]
    store = open_store(LOOPBACK)
    for rank in (1, 0):  # the last is this process's for Lightning
        ranks[rank].set_global_rank(rank)
        ranks[rank].set_world_size(3)
        ranks[rank]._port = store.port
    ranks[0]._store = store
    found: list[str] = []

    def come() -> None:
        with pytest.raises(SystemExit) as error:
            _ = ranks[1].main_port
        found.append(str(error.value))

    waiting = threading.Thread(target=come, daemon=True)
    waiting.start()
    while not store.check(["here/1"]):
        time.sleep(0.01)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    ranks[0].check(timeout=timedelta(0))
    with pytest.raises(SystemExit, match="rank 2 of 3 has not come within 0:00:00"):
        _ = ranks[0].main_port
    waiting.join()
    assert found[0].startswith("lit_cifar: rank 2 of 3 has not come")


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
    monkeypatch.setattr("lit_cifar.launch.torchrun._MEETING_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError, match=r"rank 0 did not open its store within 0.5 s"):
        _ = TorchrunEnvironment().main_port


def test_without_the_agents_store_rank_0_opens_its_own(agent: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("MASTER_ADDR", "a-name-that-torchrun-gives")
    with pytest.raises(ConfigError, match="start them again"):
        _ = TorchrunEnvironment().main_port
    with socket.create_server((LOOPBACK, 0)) as probe:  # which is free a moment later
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    environment = TorchrunEnvironment()
    assert (environment.main_address, str(environment.main_port)) == (LOOPBACK, os.environ["MASTER_PORT"])


def trainer(**given: Any) -> dict[str, Any]:
    """Arguments of a Trainer as the command line has them."""
    return {"strategy": "ddp", "devices": "auto", "num_nodes": 1, "plugins": None, **given}


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines with three processes each."""
    sizes = {"LOCAL_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "6"}
    place = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    for name, value in {**sizes, **place, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("auto", 3), ("pp", 3), ("fsdp2", 3), ("ddp_mp", 6), (DDPLayerParallelStrategy(num_stages=4), 12)],
)
@pytest.mark.parametrize("given", ["auto", 1, "1", "same"])
def test_sizes_are_those_of_torchrun(given: Any, strategy: Any, devices: int) -> None:
    same = given == "same"
    config = trainer(strategy=strategy, devices=devices if same else given, num_nodes=2 if same else 1)
    resolve_world_size(config)
    assert (config["devices"], config["num_nodes"]) == (devices, 2)
    assert [type(plugin) for plugin in config["plugins"]] == [TorchrunEnvironment]
    for named in ([0, 1, 2], "0,1,2", -1):  # one by one: they stay
        config = trainer(devices=named)
        resolve_world_size(config)
        assert config["devices"] == named


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"devices": 2}, "--trainer.devices=2, but torchrun or srun started 3 processes on each"),
        ({"devices": "0,1"}, "--trainer.devices=0,1"),
        ({"devices": [5]}, r"--trainer.devices=\[5\]"),
        ({"devices": 3, "strategy": "ddp_mp"}, "which makes 6"),
        ({"num_nodes": 3}, r"--trainer.num_nodes=3, but torchrun or srun started 2 machine\(s\)"),
        ({"strategy": "ddp_spawn"}, "--trainer.strategy=ddp_spawn starts processes itself"),
        ({"WORLD_SIZE": "5"}, "5 processes on 2 machines, but 3 on this one"),
        ({"GLOO_SOCKET_IFNAME": ""}, "export GLOO_SOCKET_IFNAME=NAME on every machine"),
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, "GLOO_SOCKET_IFNAME=nowhere0 is not one of this machine"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in filter(str.isupper, given):
        monkeypatch.setenv(name, given[name])
    with pytest.raises(ConfigError, match=problem):
        resolve_world_size(trainer(**{name: value for name, value in given.items() if name.islower()}))


def test_several_machines_or_tasks_of_a_cluster_need_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--trainer.num_nodes=2.*\n.*configs/cluster/torchrun.sh"):
        resolve_world_size(trainer(num_nodes=2))
    monkeypatch.setenv("SLURM_JOB_NAME", "training")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(ConfigError, match=r"a cluster has 4 tasks(.|\n)*srun python -m .*configs/cluster/slurm.sh"):
        resolve_world_size(trainer())
    monkeypatch.setenv("SLURM_NTASKS", "1")
    norm = ProcessSyncBatchNorm()
    config = trainer(devices=2, plugins=norm)
    resolve_world_size(config)  # then only the meeting place is added
    assert (config["devices"], config["num_nodes"]) == (2, 1)
    assert config["plugins"][0] is norm
    assert type(config["plugins"][1]) is LocalEnvironment


@pytest.mark.parametrize("where", ["plugins", "strategy"])
def test_the_users_own_environment_stays(where: str) -> None:
    own = LightningEnvironment()
    config = trainer(plugins=[own]) if where == "plugins" else trainer(strategy=DDPStrategy(cluster_environment=own))
    before = dict(config)
    resolve_world_size(config)
    assert config == before
