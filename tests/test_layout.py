"""The layout of strategies that have not started, and how it cuts a batch."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch

from lit_cifar.data.samplers import TrainSampler
from lit_cifar.layout import GhostBatches, Layout
from lit_cifar.strategies.replicas import replica_of


@pytest.mark.parametrize(
    ("trainer", "layout"),
    [
        ({"devices": 1}, Layout()),
        ({"devices": 2, "strategy": "ddp"}, Layout(num_shards=2)),
        ({"devices": 4, "strategy": "ddp_spawn"}, Layout(num_shards=4)),
        ({"devices": 2, "strategy": "ddp", "num_nodes": 3}, Layout(num_shards=6)),
        ({"devices": 2, "strategy": "dp"}, Layout(replicas_per_shard=2)),
    ],
)
def test_layout_is_known_before_processes_start(trainer: dict[str, object], layout: Layout) -> None:
    strategy = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **trainer).strategy
    assert Layout.of(strategy) == layout


def test_replicas_multiply() -> None:
    assert Layout(num_shards=3, shard=2, replicas_per_shard=2).num_replicas == 6
    assert Layout.of(SimpleNamespace()).num_replicas == 1


def test_microbatches_are_pieces_of_a_replica_and_not_replicas() -> None:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 1}, num_microbatches=4)
    layout = Layout.of(strategy)
    assert layout == Layout(num_shards=2, shard=1, num_microbatches=4)
    assert layout.num_replicas == 2
    assert Layout.of(SimpleNamespace()).num_microbatches == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"num_shards": 0},
        {"num_shards": 2, "shard": 2},
        {"shard": -1},
        {"replicas_per_shard": 0},
        {"num_microbatches": 0},
    ],
)
def test_impossible_layouts_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        Layout(**fields)


@pytest.mark.parametrize("field", ["num_shards", "accumulation", "replicas_per_shard", "num_microbatches"])
def test_impossible_cuts_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0"):
        GhostBatches(**{field: 0})


@pytest.mark.parametrize(
    ("cut", "num_samples", "positions"),
    [
        ({}, 4, [[[0, 1, 2, 3]]]),
        # Shards are interleaved.
        ({"num_shards": 2}, 6, [[[0, 2, 4]], [[1, 3, 5]]]),
        ({"num_shards": 2}, 5, [[[0, 2, 4]], [[1, 3]]]),
        ({"num_shards": 4}, 3, [[[0]], [[1]], [[2]]]),
        # Accumulation steps take turns around the shards, and come one after the other.
        ({"accumulation": 2}, 5, [[[0, 2, 4], [1, 3]]]),
        ({"num_shards": 2, "accumulation": 2}, 8, [[[0, 4], [2, 6]], [[1, 5], [3, 7]]]),
        ({"num_shards": 2, "accumulation": 2}, 6, [[[0, 4], [2]], [[1, 5], [3]]]),
        # Replicas of one process get neighbours, as many each as `Tensor.chunk` gives: 5 over 4 leave the last without.
        ({"replicas_per_shard": 2}, 6, [[[0, 1, 2]], [[3, 4, 5]]]),
        ({"replicas_per_shard": 4}, 5, [[[0, 1]], [[2, 3]], [[4]]]),
        ({"replicas_per_shard": 2, "num_shards": 2}, 8, [[[0, 2]], [[4, 6]], [[1, 3]], [[5, 7]]]),
        ({"replicas_per_shard": 2, "accumulation": 2}, 8, [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]),
        # Microbatches get neighbours, as many each as `Tensor.tensor_split` gives.
        ({"num_microbatches": 2}, 4, [[[0, 1], [2, 3]]]),
        ({"num_microbatches": 3}, 5, [[[0, 1], [2, 3], [4]]]),
        ({"num_microbatches": 4}, 5, [[[0, 1], [2], [3], [4]]]),
        ({"num_microbatches": 4}, 2, [[[0], [1]]]),
        ({"num_microbatches": 2, "num_shards": 2}, 8, [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
        ({"num_microbatches": 2, "accumulation": 2}, 8, [[[0, 2], [4, 6], [1, 3], [5, 7]]]),
        ({"num_microbatches": 2, "replicas_per_shard": 2}, 8, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        ({"num_shards": 2, "replicas_per_shard": 2, "num_microbatches": 2, "accumulation": 2}, 0, []),
    ],
)
def test_chunks(cut: dict[str, int], num_samples: int, positions: list[list[list[int]]]) -> None:
    found = GhostBatches(**cut).positions(num_samples)
    assert [[chunk.tolist() for chunk in chunks] for chunks in found] == positions


CUTS = [
    GhostBatches(num_shards=shards, accumulation=steps, replicas_per_shard=replicas, num_microbatches=microbatches)
    for shards in (1, 2, 3)
    for steps in (1, 2)
    for replicas in (1, 2, 4)
    for microbatches in (1, 2, 3)
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_position_is_in_one_chunk_that_is_not_empty(cut: GhostBatches) -> None:
    for num_samples in (1, 2, 7, 24, 47):
        chunks = [chunk for replica in cut.positions(num_samples) for chunk in replica]
        assert all(len(chunk) for chunk in chunks)
        assert sorted(torch.cat(chunks).tolist()) == list(range(num_samples))
        assert all(chunk.dtype == torch.int64 for chunk in chunks)


@pytest.mark.parametrize("num_samples", [24, 23, 13])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_chunks_are_the_parts_that_the_sampler_loads(num_shards: int, accumulation: int, num_samples: int) -> None:
    """One global batch: the ids that every shard loads, step by step, are the chunks of its only replica."""
    layouts = [Layout(num_shards=num_shards, shard=shard) for shard in range(num_shards)]
    samplers = [
        TrainSampler(num_samples=num_samples, batch_size=24, layout=layout, accumulation=accumulation, shuffle=False)
        for layout in layouts
    ]
    loaded = [[part.ids.tolist() for part in sampler] for sampler in samplers]
    for layout in layouts:
        chunks = layout.ghost_batches(accumulation=accumulation).positions(num_samples)
        assert [[chunk.tolist() for chunk in replica] for replica in chunks] == loaded


@pytest.mark.parametrize("num_samples", [1, 3, 5, 8, 13])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_chunks_are_the_parts_that_the_replicas_of_a_process_get(num_replicas: int, num_samples: int) -> None:
    owner = replica_of(num_samples, num_replicas=num_replicas)
    chunks = Layout(replicas_per_shard=num_replicas).ghost_batches().positions(num_samples)
    assert len(chunks) == int(owner.max()) + 1
    for replica, (chunk,) in enumerate(chunks):
        assert chunk.equal((owner == replica).nonzero().flatten())


def test_chunks_of_a_layout_are_those_of_all_its_shards() -> None:
    layout = Layout(num_shards=2, shard=1, replicas_per_shard=3, num_microbatches=4)
    assert layout.ghost_batches(accumulation=5) == GhostBatches(
        num_shards=2, accumulation=5, replicas_per_shard=3, num_microbatches=4
    )
