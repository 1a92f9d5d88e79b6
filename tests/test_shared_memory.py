"""Shared memory in place of messages: the bits of gloo where two processes meet, else up to rounding."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import TINY, launch, mode_flags
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lit_cifar.strategies import AveragingDDPStrategy, ShardedStrategy, shared_memory
from lit_cifar.strategies.shared_fsdp import send_through_shared_memory
from lit_cifar.strategies.shared_memory import SharedAverage, SharedSlots

# Several buckets; a last one that the number of processes does not divide; more than a block.
CASES: dict[str, dict[str, Any]] = {
    "gloo": {},
    "one bucket": {"bucket_cap_mb": 1024, "gradient_as_bucket_view": True},
    "buckets": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
    "copies": {"bucket_cap_mb": 1024},
    "no room": {"bucket_cap_mb": 1024},
    "no access": {"bucket_cap_mb": 1024},
}


def small_network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 301), nn.ReLU(), nn.Linear(301, 307), nn.ReLU(), nn.Linear(307, 3)).to(dtype)


def weights_after_three_steps(case: str, dtype: torch.dtype) -> Tensor:
    network = small_network(dtype)
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


FSDP_CASES = ("fsdp gloo", "fsdp", "fsdp bf16 gloo", "fsdp bf16", "fsdp no room", "fsdp no access")


def sharded_weights_after_three_steps(case: str, dtype: torch.dtype, mesh: DeviceMesh) -> Tensor:
    """Layers that the number of processes does not divide, of very different size."""
    network = small_network(dtype)
    policy = MixedPrecisionPolicy()
    if "bf16" in case:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (network[0], network[2], network):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    possible = []
    with pytest.MonkeyPatch.context() as patch:
        exchange = SharedSlots.exchange

        def noted(slots: SharedSlots, message: Tensor) -> list[Tensor] | None:
            found = exchange(slots, message)
            possible.append(found is not None)
            return found

        patch.setattr(SharedSlots, "exchange", noted)
        if "gloo" not in case:
            send_through_shared_memory(network, mesh.get_group())
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            network(torch.randn(5, 7, generator=generator, dtype=dtype)).square().sum().backward()
            optimizer.step()
    assert set(possible) == (set() if "gloo" in case else {"no" not in case})
    whole: list[Any] = [parameter.full_tensor() for parameter in network.parameters()]  # type: ignore[operator]
    return torch.cat([parameter.detach().flatten() for parameter in whole])


def run_rank(rank: int, world_size: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for dtype in (torch.float32, torch.float64):
        for case in (*CASES, *FSDP_CASES):
            with pytest.MonkeyPatch.context() as patch:
                if "no room" in case and rank == 0:
                    patch.setattr(shared_memory, "_has_room", lambda num_bytes: False)
                if "no access" in case and rank == 0:
                    patch.setattr(os, "access", lambda path, mode: False)
                if case.startswith("fsdp"):
                    found[case, dtype] = sharded_weights_after_three_steps(case, dtype, mesh)
                else:
                    found[case, dtype] = weights_after_three_steps(case, dtype)
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_weights_as_with_gloo(tmp_path: Path, world_size: int) -> None:
    mp.start_processes(run_rank, (world_size, str(tmp_path)), nprocs=world_size, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(world_size)]
    for (case, dtype), weights in ranks[0].items():
        tolerance = 0 if world_size == 2 else 1e-6 if dtype == torch.float32 or "bf16" in case else 1e-14
        for other in ranks:
            torch.testing.assert_close(other[case, dtype], weights, rtol=0, atol=0)
        expected = ranks[0][f"{'fsdp ' * ('fsdp' in case)}{'bf16 ' * ('bf16' in case)}gloo", dtype]
        torch.testing.assert_close(weights, expected, rtol=0, atol=tolerance)


def test_ddp_of_the_command_line_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = ["--trainer.callbacks+=shared_hook.ReportHook", f"--trainer.callbacks.folder={tmp_path}"]
    launch("fit", *TINY, *mode_flags("ddp"), f"--run_dir={tmp_path / 'run'}", *report, "--trainer.max_steps=2", ranks=2)
    assert sorted(path.read_text() for path in tmp_path.glob("hook*")) == ["1 True True", "1 True True"]


def test_fsdp2_of_the_command_line_uses_it(tmp_path: Path) -> None:
    report = ["--trainer.callbacks+=shared_hook.ReportSlots", f"--trainer.callbacks.folder={tmp_path}"]
    flags = [*TINY, *mode_flags("fsdp2"), f"--run_dir={tmp_path / 'run'}", "--trainer.max_steps=2"]
    launch("fit", *flags, *report, ranks=2)
    counts = [int(path.read_text()) for path in tmp_path.glob("slots*")]
    assert len(counts) == 2
    assert counts[0] == counts[1] > 10


def test_it_is_for_several_processes_on_one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several machines share no memory, GPUs have NCCL, one process has nobody to average with."""
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")

    def shares(kind: Any, *, device: str = "cpu", machines: int = 1, processes: int = 2) -> bool:
        strategy = kind()
        strategy.parallel_devices = [torch.device(device)] * processes
        monkeypatch.setattr(kind, "world_size", processes * machines)
        strategy.num_nodes = machines
        return bool(strategy.shares_memory)

    for kind in (AveragingDDPStrategy, ShardedStrategy):
        assert shares(kind)
        assert not shares(kind, device="meta")
        assert not shares(kind, machines=2)
        assert not shares(kind, processes=1)
