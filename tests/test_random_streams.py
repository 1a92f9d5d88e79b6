"""What a network draws depends on the step and on the part of the batch alone."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_cifar.models.random_streams import RandomStreams, begin_part
from lit_cifar.task.module import LitResNet


@pytest.fixture(autouse=True)
def generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def drawn(*, step: int, batch: int = 0, accumulation: int = 1, ranks: int = 1, rank: int = 0, place: int = 0) -> float:
    """The first number of a part: of a batch of the loader, on a rank, with virtual replicas the one at that place."""
    split = {"num_replicas": ranks, "rank": rank}
    strategy = SimpleNamespace(root_device=torch.device("cpu"), distributed_sampler_kwargs=split)
    data, streams = SimpleNamespace(seed=0), RandomStreams()
    trainer: Any = SimpleNamespace(strategy=strategy, datamodule=data, global_step=step)
    trainer.accumulate_grad_batches = accumulation
    module = LitResNet("tiny")
    streams.on_train_start(trainer, module)
    streams.on_train_batch_start(trainer, module, None, batch)
    begin_part(place)
    found = float(torch.rand(()))
    streams.on_train_end(trainer, module)
    return found


def test_every_step_and_every_part_draws_something_else() -> None:
    assert len({drawn(step=step, ranks=4, rank=rank) for step in range(3) for rank in range(4)}) == 12


def test_the_four_parts_of_a_batch_draw_the_same_whoever_takes_them() -> None:
    parts = [drawn(step=2, ranks=4, rank=rank) for rank in range(4)]
    assert [drawn(step=2, accumulation=4, batch=8 + number) for number in range(4)] == parts
    assert [drawn(step=2, place=place) for place in range(4)] == parts
    assert [drawn(step=2, accumulation=2, batch=n, ranks=2, rank=rank) for n in range(2) for rank in range(2)] == parts
    assert [drawn(step=2, place=place, ranks=2, rank=rank) for place in range(2) for rank in range(2)] == parts
