"""`ddp_mp`: processes and devices as arithmetic, and what is refused; `test_parity` trains."""

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_only

import lit_cifar.strategies.mp
from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.errors import ConfigError
from lit_cifar.strategies import DDPLayerParallelStrategy
from lit_cifar.task.module import LitResNet

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def strategy_of(num_devices: int, *, rank: int = 0, **sizes: Any) -> Any:
    """A strategy in the state in which a Trainer has it when it checks the flags; each device is another one."""
    environment: Any = LightningEnvironment()
    environment.local_rank = lambda: rank
    environment.world_size = lambda: num_devices // sizes.get("num_stages", 2)
    devices = [torch.device("cuda", index) for index in range(num_devices)]
    return DDPLayerParallelStrategy(parallel_devices=devices, cluster_environment=environment, **sizes)


@pytest.mark.parametrize(
    ("num_devices", "num_stages", "of_ranks"),
    [(4, 2, [[0, 1], [2, 3]]), (2, 2, [[0, 1]]), (6, 3, [[0, 1, 2], [3, 4, 5]]), (2, 1, [[0], [1]])],
)
def test_processes_and_their_devices(
    num_devices: int, num_stages: int, of_ranks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which the strategy is about to change
    for rank, indices in enumerate(of_ranks):
        strategy = strategy_of(num_devices, rank=rank, num_stages=num_stages)
        strategy.set_world_ranks()
        strategy.check()
        assert strategy.num_processes == len(of_ranks)
        assert [device.index for device in strategy.stage_devices] == indices
        assert strategy.root_device.index == indices[0]
        assert strategy.distributed_sampler_kwargs == {"num_replicas": len(of_ranks), "rank": rank}


def test_plan_names_the_devices_of_every_process() -> None:
    strategy = strategy_of(4, num_microbatches=2)
    strategy.connect(LitResNet("resnet10", stem="imagenet"))
    first, second, other = strategy.split_lines()
    assert "cuda 0 " in first
    assert "cuda 1 " in second
    assert other == "process 1: the same on cuda 2, cuda 3"
    assert BatchSplit.of(strategy) == BatchSplit(dp_size=2, num_microbatches=2)


def test_nccl_is_tied_to_none_of_the_devices_and_waits_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once tied to one it refuses every other device of the process."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which the strategy is about to change
    calls: list[Any] = []
    monkeypatch.setattr(lit_cifar.strategies.mp, "_init_dist_connection", lambda *_, **names: calls.append([*names]))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "barrier", lambda device_ids: calls.append(device_ids))
    monkeypatch.setattr(lit_cifar.strategies.mp, "DistributedDataParallel", lambda model, **its: calls.append(its))
    strategy = strategy_of(4, rank=1)
    strategy.barrier()
    strategy.setup_distributed()
    strategy._setup_model(torch.nn.Linear(2, 2))
    monkeypatch.undo()
    assert calls == [[2], ["timeout"], {}]


def test_torchrun_with_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="4 processes were started"):
        L.Trainer(strategy="ddp_mp", devices=4, accelerator="cpu", **QUIET)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert L.Trainer(strategy="ddp_mp", devices=4, accelerator="cpu", **QUIET).strategy.num_processes == 2
