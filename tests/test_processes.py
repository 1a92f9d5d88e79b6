"""What a Trainer is told about its processes: sizes from torchrun, and an environment in which they meet."""

from typing import Any

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from lit_cifar.errors import ConfigError
from lit_cifar.launch.rendezvous import LocalEnvironment, TorchrunEnvironment, resolve_world_size
from lit_cifar.strategies import DDPLayerParallelStrategy, ProcessSyncBatchNorm


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
    [("auto", 3), ("ddp", 3), ("pp", 3), ("fsdp2", 3), ("ddp_mp", 6), (DDPLayerParallelStrategy(num_stages=4), 12)],
)
@pytest.mark.parametrize("given", ["auto", 1, "1", "same"])
def test_sizes_are_those_of_torchrun(given: Any, strategy: Any, devices: int) -> None:
    same = given == "same"
    config = trainer(strategy=strategy, devices=devices if same else given, num_nodes=2 if same else 1)
    resolve_world_size(config)
    assert (config["devices"], config["num_nodes"]) == (devices, 2)
    assert [type(plugin) for plugin in config["plugins"]] == [TorchrunEnvironment]


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("devices", [[0, 1, 2], "0,1,2", -1, "-1", "3"])
def test_devices_named_one_by_one_stay(devices: Any) -> None:
    config = trainer(devices=devices)
    resolve_world_size(config)
    assert config["devices"] == devices


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"devices": 2}, "--trainer.devices=2, but torchrun started --nproc-per-node=3"),
        ({"devices": "0,1"}, "--trainer.devices=0,1"),
        ({"devices": [5]}, r"--trainer.devices=\[5\]"),
        ({"devices": 3, "strategy": "ddp_mp"}, "which makes 6"),
        ({"num_nodes": 3}, r"--trainer.num_nodes=3, but torchrun started 2 machine\(s\)"),
        ({"strategy": "ddp_spawn"}, "--trainer.strategy=ddp_spawn starts processes itself"),
        ({"WORLD_SIZE": "5"}, "5 processes on 2 machines, but 3 on this one"),
        ({"GLOO_SOCKET_IFNAME": ""}, "export GLOO_SOCKET_IFNAME=NAME on every machine"),
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, "GLOO_SOCKET_IFNAME=nowhere0 is not an interface of this machine"),
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
    with pytest.raises(ConfigError, match=r"a cluster has 4 tasks(.|\n)*configs/cluster/slurm.sh"):
        resolve_world_size(trainer())
    monkeypatch.setenv("SLURM_NTASKS", "1")
    norm = ProcessSyncBatchNorm()
    config = trainer(devices=2, plugins=norm)
    resolve_world_size(config)  # then only the meeting place is added
    assert (config["devices"], config["num_nodes"]) == (2, 1)
    assert config["plugins"][0] is norm
    assert type(config["plugins"][1]) is LocalEnvironment


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("mode", ["dp", "mp"])
def test_modes_of_one_process_are_left_to_refuse_others_themselves(mode: str) -> None:
    config = trainer(strategy=mode, num_nodes=2)
    resolve_world_size(config)
    assert config == trainer(strategy=mode, num_nodes=2)


@pytest.mark.parametrize("where", ["plugins", "strategy"])
def test_the_users_own_environment_stays(where: str) -> None:
    own = LightningEnvironment()
    config = trainer(plugins=[own]) if where == "plugins" else trainer(strategy=DDPStrategy(cluster_environment=own))
    before = dict(config)
    resolve_world_size(config)
    assert config == before
