"""The batch split of strategies that have not started, and how it cuts a batch."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch

from lit_cifar.data.batch_split import BatchSplit, GhostBatches
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.strategies.dp import replica_of


@pytest.mark.parametrize(
    ("trainer", "batch_split"),
    [
        ({"devices": 1}, BatchSplit()),
        ({"devices": 2, "strategy": "ddp"}, BatchSplit(dp_size=2)),
        ({"devices": 4, "strategy": "ddp_spawn"}, BatchSplit(dp_size=4)),
        ({"devices": 2, "strategy": "ddp", "num_nodes": 3}, BatchSplit(dp_size=6)),
        ({"devices": 2, "strategy": "dp"}, BatchSplit(replicas_per_rank=2)),
    ],
)
def test_batch_split_is_known_before_processes_start(trainer: dict[str, object], batch_split: BatchSplit) -> None:
    strategy = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **trainer).strategy
    assert BatchSplit.of(strategy) == batch_split


def test_replicas_multiply_and_microbatches_are_pieces_of_them() -> None:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 3, "rank": 2}, replicas_per_rank=2)
    strategy.num_microbatches = 4
    batch_split = BatchSplit.of(strategy)
    assert batch_split == BatchSplit(dp_size=3, dp_rank=2, replicas_per_rank=2, num_microbatches=4)
    assert batch_split.num_replicas == 6
    assert BatchSplit.of(SimpleNamespace()) == BatchSplit()
    assert batch_split.ghost_batches(accumulation=5) == GhostBatches(
        dp_size=3, accumulation=5, replicas_per_rank=2, num_microbatches=4
    )


@pytest.mark.parametrize("field", ["dp_size", "accumulation", "replicas_per_rank", "num_microbatches"])
def test_impossible_cuts_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0"):
        GhostBatches(**{field: 0})


@pytest.mark.parametrize(
    ("cut", "num_samples", "positions"),
    [
        ({}, 4, [[[0, 1, 2, 3]]]),
        # Shards are interleaved.
        ({"dp_size": 2}, 5, [[[0, 2, 4]], [[1, 3]]]),
        ({"dp_size": 4}, 3, [[[0]], [[1]], [[2]]]),
        # Accumulation steps take turns around the shards, and come one after the other.
        ({"accumulation": 2}, 5, [[[0, 2, 4], [1, 3]]]),
        ({"dp_size": 2, "accumulation": 2}, 6, [[[0, 4], [2]], [[1, 5], [3]]]),
        # Replicas of one process get neighbours, as many each as `Tensor.chunk` gives: 5 over 4 leave the last without.
        ({"replicas_per_rank": 4}, 5, [[[0, 1]], [[2, 3]], [[4]]]),
        ({"replicas_per_rank": 2, "dp_size": 2}, 8, [[[0, 2]], [[4, 6]], [[1, 3]], [[5, 7]]]),
        ({"replicas_per_rank": 2, "accumulation": 2}, 8, [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]),
        # Microbatches get neighbours, as many each as `Tensor.tensor_split` gives.
        ({"num_microbatches": 4}, 5, [[[0, 1], [2], [3], [4]]]),
        ({"num_microbatches": 4}, 2, [[[0], [1]]]),
        ({"num_microbatches": 2, "dp_size": 2}, 8, [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
        ({"num_microbatches": 2, "accumulation": 2}, 8, [[[0, 2], [4, 6], [1, 3], [5, 7]]]),
        ({"num_microbatches": 2, "replicas_per_rank": 2}, 8, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        ({"dp_size": 2, "replicas_per_rank": 2, "num_microbatches": 2, "accumulation": 2}, 0, []),
        # Synchronised ranks share a chunk for each accumulation step.
        ({"dp_size": 2, "accumulation": 2, "synchronised": True}, 7, [[[0, 1, 4, 5], [2, 3, 6]]]),
    ],
)
def test_chunks(cut: dict[str, int], num_samples: int, positions: list[list[list[int]]]) -> None:
    found = GhostBatches(**cut).positions(num_samples)
    assert [[chunk.tolist() for chunk in chunks] for chunks in found] == positions


CUTS = [
    GhostBatches(dp_size=shards, accumulation=steps, replicas_per_rank=replicas, num_microbatches=microbatches)
    for shards in (1, 3)
    for steps in (1, 2)
    for replicas in (1, 4)
    for microbatches in (1, 3)
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_position_is_in_one_chunk_that_is_not_empty(cut: GhostBatches) -> None:
    for num_samples in (1, 2, 7, 24, 47):
        chunks = [chunk for replica in cut.positions(num_samples) for chunk in replica]
        assert all(len(chunk) for chunk in chunks)
        assert sorted(torch.cat(chunks).tolist()) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [24, 23, 13])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_chunks_are_the_parts_that_the_sampler_loads(dp_size: int, accumulation: int, num_samples: int) -> None:
    """One global batch: the ids that every rank loads, step by step, are the chunks of its only replica."""
    splits = [BatchSplit(dp_size=dp_size, dp_rank=rank) for rank in range(dp_size)]
    settings = {"num_samples": num_samples, "batch_size": 24, "accumulation": accumulation, "shuffle": False}
    loaded = [[part.ids.tolist() for part in TrainSampler(batch_split=split, **settings)] for split in splits]
    chunks = splits[0].ghost_batches(accumulation=accumulation).positions(num_samples)
    assert [[chunk.tolist() for chunk in replica] for replica in chunks] == loaded


@pytest.mark.parametrize("num_samples", [1, 3, 5, 8, 13])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_chunks_are_the_parts_that_the_replicas_of_a_process_get(num_replicas: int, num_samples: int) -> None:
    owner = replica_of(num_samples, num_replicas=num_replicas)
    chunks = BatchSplit(replicas_per_rank=num_replicas).ghost_batches().positions(num_samples)
    assert len(chunks) == int(owner.max()) + 1
    for replica, (chunk,) in enumerate(chunks):
        assert chunk.equal((owner == replica).nonzero().flatten())
