"""`ddp_mp`: processes and devices as arithmetic, what is refused, and one launched run against one device."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from commands import TINY, launch, run_here
from comparing import assert_same_checkpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_only
from torch.nn.parallel import DistributedDataParallel

import lit_cifar.strategies.ddp_mp
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.errors import ConfigError
from lit_cifar.strategies import DDPLayerParallelStrategy, ProcessSyncBatchNorm
from lit_cifar.task.module import LitResNet

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
CLASS = "--trainer.strategy=DDPLayerParallelStrategy"


class Rank(LightningEnvironment):
    """A process that somebody else has started, of so many."""

    def __init__(self, rank: int = 0, *, world_size: int) -> None:
        super().__init__()
        self._started, self._rank = world_size, rank

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._started

    def local_rank(self) -> int:
        return self._rank


def strategy_of(num_devices: int, *, rank: int = 0, started: int | None = None, **sizes: Any) -> Any:
    """A strategy in the state in which a Trainer has it when it checks the flags; each device is another one."""
    devices = [torch.device("cuda", index) for index in range(num_devices)]
    world_size = num_devices // sizes.get("num_stages", 2) if started is None else started
    return DDPLayerParallelStrategy(
        parallel_devices=devices, cluster_environment=Rank(rank, world_size=world_size), **sizes
    )


# ---------------------------------------------------------------- sizes


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
        assert strategy.determine_ddp_device_ids() is None


def test_plan_names_the_devices_of_every_process() -> None:
    strategy = strategy_of(4, num_microbatches=2)
    strategy.connect(LitResNet("resnet10", stem="imagenet"))
    first, second, other = strategy.split_lines()
    assert "cuda 0 " in first
    assert "cuda 1 " in second
    assert other == "process 1: the same on cuda 2, cuda 3"
    assert BatchSplit.of(strategy) == BatchSplit(dp_size=2, num_microbatches=2)


def test_the_process_group_is_not_tied_to_one_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses every other device of the process once it is."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(lit_cifar.strategies.ddp_mp, "_init_dist_connection", lambda *a, **kwargs: calls.append(kwargs))
    strategy_of(4).setup_distributed()
    assert [set(call) for call in calls] == [{"timeout"}]


def test_nccl_waits_on_the_root_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "barrier", lambda device_ids: calls.append(device_ids))
    strategy_of(4, rank=1).barrier()
    monkeypatch.undo()
    assert calls == [[2]]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("num_devices", "arguments", "problem", "remedy"),
    [
        (3, {}, "2 stages does not divide --trainer.devices=3", "--trainer.devices=4"),
        (1, {}, "2 stages does not divide --trainer.devices=1", "--trainer.devices=2"),
        (4, {"num_stages": 3}, "3 stages does not divide --trainer.devices=4", "--trainer.devices=3"),
        (4, {"num_stages": 0, "started": 4}, "num_stages=0 is less than one", "num_stages=1"),
        (4, {"num_microbatches": -1}, "num_microbatches=-1 is less than one", "num_microbatches=1"),
        (4, {"started": 4}, "4 processes were started, but --trainer.devices=4", "--nproc-per-node=2"),
        (2, {"started": 2}, "2 processes were started, but --trainer.devices=2", "--nproc-per-node=1"),
    ],
)
def test_refused_before_launch(num_devices: int, arguments: dict[str, Any], problem: str, remedy: str) -> None:
    strategy = strategy_of(num_devices, **arguments)
    strategy.set_world_ranks()
    with pytest.raises(ConfigError) as caught:
        strategy._configure_launcher()
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    assert len(str(caught.value).splitlines()) <= 5


def test_synchronised_microbatches_are_refused() -> None:
    with pytest.raises(ConfigError, match="sync_batchnorm=true with 2 microbatches"):
        L.Trainer(
            strategy=DDPLayerParallelStrategy(num_microbatches=2),
            devices=4,
            accelerator="cpu",
            plugins=[ProcessSyncBatchNorm()],
            **QUIET,
        )


def test_torchrun_with_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="4 processes were started"):
        L.Trainer(strategy="ddp_mp", devices=4, accelerator="cpu", **QUIET)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert L.Trainer(strategy="ddp_mp", devices=4, accelerator="cpu", **QUIET).strategy.num_processes == 2


# ---------------------------------------------------------------- whole runs, equal to one device


SETTINGS = [*TINY, "--trainer.precision=64-true", "--model.optimizer.lr=0.02", "--trainer.limit_val_batches=0"]


@pytest.fixture
def one_process() -> Iterator[None]:
    """Lightning leaves the group of a process that is alone, and the variables by which it would meet others."""
    before = dict(os.environ)
    yield
    dist.destroy_process_group()
    for name in ("MASTER_ADDR", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]


def checkpoint_of(folder: Path) -> dict[str, Any]:
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")


@pytest.mark.usefixtures("one_process")
def test_one_process_with_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[DistributedDataParallel] = []
    configure_ddp = DDPLayerParallelStrategy.configure_ddp

    def spy(self: Any) -> None:
        configure_ddp(self)
        wrapped.append(self.model)

    monkeypatch.setattr(DDPLayerParallelStrategy, "configure_ddp", spy)
    flags = ["--trainer.strategy=ddp_mp", "--trainer.devices=2"]
    result = run_here("fit", *SETTINGS, *flags, f"--run_dir={tmp_path / 'ddp_mp'}")
    assert result.status == 0, result.stderr
    assert wrapped[0].device_ids is None
    assert run_here("fit", *SETTINGS, "--trainer.devices=1", f"--run_dir={tmp_path / 'alone'}").status == 0
    assert_same_checkpoint(checkpoint_of(tmp_path / "ddp_mp"), checkpoint_of(tmp_path / "alone"), tolerance=1e-12)


def test_two_processes_equal_one_device_that_normalises_each_part(tmp_path: Path) -> None:
    """Also the microbatches of each process, the keys and the optimizer's state."""
    flags = [CLASS, "--trainer.strategy.num_microbatches=2", "--trainer.devices=4"]
    launch("fit", *SETTINGS, *flags, f"--run_dir={tmp_path / 'ddp_mp'}", ranks=2)
    chunks = ["--model.ghost_batchnorm.num_shards=2", "--model.ghost_batchnorm.num_microbatches=2"]
    alone = run_here("fit", *SETTINGS, *chunks, "--trainer.devices=1", f"--run_dir={tmp_path / 'alone'}")
    assert alone.status == 0, alone.stderr
    assert_same_checkpoint(checkpoint_of(tmp_path / "ddp_mp"), checkpoint_of(tmp_path / "alone"), tolerance=1e-9)
