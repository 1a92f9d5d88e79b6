"""What `dp` and `mp` share: one process with nobody to talk to, and the refusal of others."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_cifar.errors import ConfigError

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class ClusterOfTwo(LightningEnvironment):
    """An environment in which somebody else has started two processes."""

    def world_size(self) -> int:
        return 2


def trainer_of(mode: str, **kwargs: Any) -> L.Trainer:
    return L.Trainer(strategy=mode, devices=2, accelerator="cpu", **{**QUIET, **kwargs})


@pytest.mark.parametrize("mode", ["dp", "mp"])
def test_a_process_alone(mode: str) -> None:
    trainer = trainer_of(mode)
    assert (trainer.world_size, trainer.global_rank, trainer.is_global_zero) == (1, 0, True)
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    assert not trainer._accelerator_connector.is_distributed, "Lightning would divide the data among processes"


@pytest.mark.parametrize("mode", ["dp", "mp"])
def test_communicates_as_a_single_device_does(mode: str) -> None:
    tensor = torch.arange(3)
    for strategy in (trainer_of(mode).strategy, SingleDeviceStrategy()):
        assert strategy.all_gather(tensor) is tensor
        assert strategy.reduce(tensor, reduce_op="sum") is tensor
        assert strategy.broadcast(tensor) is tensor
        assert strategy.reduce_boolean_decision(False) is False
        strategy.barrier()


@pytest.mark.parametrize(("mode", "instead"), [("dp", "ddp"), ("mp", "ddp_mp")])
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [({"num_nodes": 2}, "--trainer.num_nodes=2"), ({"plugins": [ClusterOfTwo()]}, "2 were started")],
)
def test_other_processes_are_refused(mode: str, instead: str, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_of(mode, **arguments)
    assert f"--trainer.strategy={mode} is one process" in caught.value.problem
    assert problem in caught.value.problem
    assert f"--trainer.strategy={instead}" in caught.value.remedy
    assert len(str(caught.value).splitlines()) <= 5


@pytest.mark.parametrize("mode", ["dp", "mp"])
def test_torchrun_is_refused_even_with_one_process(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun"):
        trainer_of(mode)


@pytest.mark.parametrize("mode", ["dp", "mp"])
def test_a_module_without_a_runner_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="LightningModule has no network and no use_runner"):
        trainer_of(mode).strategy.connect(L.LightningModule())
