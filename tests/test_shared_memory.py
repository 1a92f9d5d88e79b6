"""Gradients averaged in shared memory: the bits of gloo's all-reduce where two processes meet, else up to rounding."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import TINY, launch, mode_flags
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from lit_cifar.strategies import AveragingDDPStrategy, shared_memory
from lit_cifar.strategies.shared_memory import SharedAverage

# Several buckets; a last one that the number of processes does not divide; more than a block.
CASES: dict[str, dict[str, Any]] = {
    "gloo": {},
    "one bucket": {"bucket_cap_mb": 1024, "gradient_as_bucket_view": True},
    "buckets": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
    "copies": {"bucket_cap_mb": 1024},
    "no room": {"bucket_cap_mb": 1024},
    "no access": {"bucket_cap_mb": 1024},
}


def weights_after_three_steps(case: str, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 301), nn.ReLU(), nn.Linear(301, 307), nn.ReLU(), nn.Linear(307, 3)).to(dtype)
    wrapped = DistributedDataParallel(network, **CASES[case])
    average = SharedAverage(dist.group.WORLD)
    if case != "gloo":
        wrapped.register_comm_hook(average, SharedAverage.__call__)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):  # DDP makes new buckets after the first
        optimizer.zero_grad()
        wrapped(torch.randn(5, 7, generator=generator, dtype=dtype)).square().sum().backward()
        optimizer.step()
    if case != "gloo":
        assert average._is_possible == (not case.startswith("no "))
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def run_rank(rank: int, world_size: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    found = {}
    for dtype in (torch.float32, torch.float64):
        for case in CASES:
            with pytest.MonkeyPatch.context() as patch:
                if case == "no room" and rank == 0:
                    patch.setattr(shared_memory, "_has_room", lambda num_bytes: False)
                if case == "no access" and rank == 0:
                    patch.setattr(os, "access", lambda path, mode: False)
                found[case, dtype] = weights_after_three_steps(case, dtype)
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_weights_as_with_gloo(tmp_path: Path, world_size: int) -> None:
    mp.start_processes(run_rank, (world_size, str(tmp_path)), nprocs=world_size, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(world_size)]
    for (case, dtype), weights in ranks[0].items():
        tolerance = 0 if world_size == 2 else {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
        for other in ranks:
            torch.testing.assert_close(other[case, dtype], weights, rtol=0, atol=0)
        torch.testing.assert_close(weights, ranks[0]["gloo", dtype], rtol=0, atol=tolerance)


def test_ddp_of_the_command_line_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = ["--trainer.callbacks+=shared_hook.ReportHook", f"--trainer.callbacks.folder={tmp_path}"]
    launch("fit", *TINY, *mode_flags("ddp"), f"--run_dir={tmp_path / 'run'}", *report, "--trainer.max_steps=2", ranks=2)
    assert sorted(path.read_text() for path in tmp_path.glob("hook*")) == ["1 True True", "1 True True"]


def test_it_is_for_several_processes_on_one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several machines share no memory, GPUs have NCCL, one process has nobody to average with."""
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")

    def shares(*, device: str = "cpu", machines: int = 1, processes: int = 2) -> bool:
        strategy = AveragingDDPStrategy(parallel_devices=[torch.device(device)] * processes)
        monkeypatch.setattr(AveragingDDPStrategy, "world_size", processes * machines)
        strategy.num_nodes = machines
        return strategy.shares_memory

    assert shares()
    assert not shares(device="meta")
    assert not shares(machines=2)
    assert not shares(processes=1)
