"""Sums over parts: the same bits in any number of buckets, of which the first travel during backward."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lit_cifar.strategies.same_bits import parts
from lit_cifar.strategies.same_bits.parts import PartSums, _buckets
from lit_cifar.strategies.same_bits.tree_sum import TreeSum, in_tree_order

NUM_PARTS, STEPS = 4, 3


def network_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 31), nn.ReLU(), nn.Linear(31, 37), nn.ReLU(), nn.Linear(37, 3))


def sums_of(world_size: int, rank: int) -> tuple[list[Tensor], list[list[str]]]:
    """The sums of every step, and in which order gradients came and exchanges began."""
    network = network_of()
    events: list[list[str]] = []
    names = {parameter: name for name, parameter in network.named_parameters()}
    own = range(rank, NUM_PARTS, world_size)
    sums = PartSums(len(own), group=None, is_alone=world_size == 1)
    sums.watch(network.parameters())
    for parameter in names:
        parameter.register_post_accumulate_grad_hook(lambda parameter: events[-1].append(names[parameter]))  # type: ignore[no-untyped-call]
    exchanges = parts.TreeAllReduce

    def recorded(*args: Any, **kwargs: Any) -> Any:
        events[-1].append("exchange")
        return exchanges(*args, **kwargs)

    found, other = [], torch.ones(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "TreeAllReduce", recorded)
        for step in range(STEPS):
            events.append([])
            sums.begin()
            statistics = TreeSum()
            for place in in_tree_order(len(own)):
                generator = torch.Generator().manual_seed(100 * step + own[place])
                network(torch.randn(5, 7, generator=generator)).square().sum().backward()
                statistics.push(torch.randn(2, generator=generator))
            totals = sums.finish({other: statistics})
            assert {*totals} == {*names, other}
            assert all(parameter.grad is None for parameter in names)
            found.append(torch.cat([totals[key].flatten() for key in (*names, other)]))
    return found, events


def run_rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "BUCKET_BYTES", 700)
        torch.save(sums_of(world_size, rank), Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_bits_of_one_process_in_several_buckets(tmp_path: Path, world_size: int) -> None:
    alone, _ = sums_of(1, 0)
    mp.start_processes(run_rank, (world_size, str(tmp_path)), nprocs=world_size, start_method="forkserver")  # type: ignore[attr-defined,no-untyped-call]
    for rank in range(world_size):
        found, events = torch.load(tmp_path / f"rank{rank}.pt")
        assert [total.equal(whole) for total, whole in zip(found, alone, strict=True)] == [True] * STEPS
        assert set(events[0][-5:]) == {"exchange"}  # the first step: after all gradients
        assert events[1].index("exchange") < len(events[1]) - events[1][::-1].index("0.weight")  # backward goes on
        assert events[2] == events[1]


def test_a_parameter_without_gradient_delays_a_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step has buckets of those that got one."""

    class Unchanged:
        def __init__(self, flat: Tensor, *, group: object) -> None:
            self.flat = flat

        def add(self) -> None: ...

        def take(self) -> Tensor:
            return self.flat

    monkeypatch.setattr(parts, "TreeAllReduce", Unchanged)
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    sums = PartSums(1, group=None, is_alone=False)
    sums.watch([used, unused])
    early = []
    for parameters in ([used, unused], [used], [used], [used, unused]):
        sums.begin()
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()  # type: ignore[no-untyped-call]
        early.append(len(sums._exchanges))
        assert {*sums.finish({})} == {*parameters}
    assert early == [0, 0, 1, 1]


def test_buckets_hold_neighbours_of_a_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BUCKET_BYTES", 40)
    small, large, meta = torch.ones(5), torch.ones(100), torch.ones(5, device="meta")
    double = torch.ones(2, dtype=torch.float64)
    tensors = [small, small, small, large, small, meta, double]
    sizes = [[tensor.nbytes for tensor in bucket] for bucket in _buckets(tensors)]
    assert sizes == [[20, 20], [20], [400], [20], [20], [16]]
