"""What is drawn by chance: augmentation from (seed, epoch, sample id), a network's numbers from step and part."""

from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counting import Operators
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.data.augment import Augmentation, crop
from lit_cifar.data.counter_rng import Purpose, keyed_bits, keyed_integers, keyed_permutation
from lit_cifar.models.random_streams import RandomStreams, draw_for_part, know_stages
from lit_cifar.strategies.mp import StagedForward
from lit_cifar.task.module import LitResNet


def digest(tensor: Tensor) -> str:
    return sha256(tensor.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, "44edf9e5b545b3ce"), ({"cutout": 16, "padding": 2}, "74cd95c8dc744600")]
)
def test_the_bytes_of_every_version_are_the_same(settings: dict[str, int], expected: str) -> None:
    """Digests of 0.1.0: who goes on with a run of then and its settings has its images."""
    images = (torch.arange(64 * 3 * 32 * 32) * 2654435761 >> 7 & 255).to(torch.uint8).reshape(64, 3, 32, 32)
    augmentation = Augmentation(seed=5, reflect=False, alternate_flips=False, **settings)
    found = augmentation(images, augmentation.draw(torch.arange(1000, 1064), (32, 32), epoch=2))
    assert found.is_contiguous()
    assert digest(found) == expected


def test_the_draws_of_every_version_are_the_same_and_start_few_operators() -> None:
    """Nothing is read: a key is made of integers of Python. As a tensor it took 41 operators more."""
    with Operators() as operators:
        bits = keyed_bits(torch.arange(1000), seed=2**62 - 1, epoch=7, purpose=Purpose.FLIP)
        keyed_integers(torch.arange(64), 9, seed=1, epoch=2, purpose=Purpose.FLIP)
    assert not operators.waits
    assert operators.counts.total() <= 40
    assert digest(bits) == "8c700d0a4a8e82c4"
    assert digest(keyed_permutation(50_000, seed=0, epoch=3, purpose=Purpose.ORDER)) == "3c0ac495f207b92d"


@pytest.mark.parametrize(("padding", "reflect"), [(0, False), (1, False), (4, False), (4, True)])
def test_every_window_is_the_one_a_padded_image_has(padding: int, reflect: bool) -> None:
    """By slices of each image: all places and both directions, not square. The host waits for nothing."""
    images = torch.randint(1, 256, (3, 2, 7, 5), dtype=torch.uint8)  # never black: what the border blackens is seen
    before, places = images.clone(), torch.arange(2 * padding + 1)
    ids, rows, columns, mirrored = torch.cartesian_prod(torch.arange(3), places, places, torch.arange(2)).T
    with Operators() as operators:
        found = crop(images[ids], rows, columns, mirrored.bool(), padding=padding, reflect=reflect)
    for window, image, row, column, mirror in zip(found, images[ids], rows, columns, mirrored, strict=True):
        expected = F.pad(image.float(), [padding] * 4, mode="reflect" if reflect else "constant").byte()
        expected = expected[:, row : row + 7, column : column + 5]
        assert window.equal(expected.flip(2) if mirror else expected)
    assert not operators.waits
    assert images.equal(before)


def test_every_second_epoch_mirrors_the_other_images() -> None:
    augmentation, ids = Augmentation(seed=3, alternate_flips=True), torch.arange(1000)
    first, second, third = (augmentation.draw(ids, (32, 32), epoch=epoch) for epoch in range(3))
    assert first[2].equal(1 - second[2])
    assert first[2].equal(third[2])
    assert 450 < first[2].sum() < 550
    assert not first[:2].equal(third[:2])


@pytest.fixture(autouse=True)
def generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


TWICE = nn.Sequential(half := nn.Dropout(0.5), nn.Identity(), half)


def drawn(
    run: Any = None, step: int = 0, batch: int = 0, accumulation: int = 1, ranks: int = 1, rank: int = 0, place: int = 0
) -> Any:
    """The first number of a part: of a batch of the loader, on a rank, with virtual replicas the one at that place."""
    split = {"num_replicas": ranks, "rank": rank}
    strategy = SimpleNamespace(root_device=torch.device("cpu"), distributed_sampler_kwargs=split)
    data, streams = SimpleNamespace(seed=0), RandomStreams()
    trainer: Any = SimpleNamespace(strategy=strategy, datamodule=data, global_step=step)
    trainer.accumulate_grad_batches = accumulation
    module = LitResNet(network=TWICE)
    streams.on_train_start(trainer, module)
    streams.on_train_batch_start(trainer, module, None, batch)
    draw_for_part(place)
    found = run() if run else float(torch.rand(()))
    streams.on_train_end(trainer, module)
    return found


@pytest.mark.parametrize("cut", range(4))
def test_a_layer_that_stands_twice_draws_twice(cut: int) -> None:
    """The same wherever the network is cut into stages."""
    images, stages = torch.ones(1, 1000), [TWICE[:cut], TWICE[cut:]]
    alone = drawn(partial(TWICE, images))
    assert 200 < alone.count_nonzero() < 300
    know_stages(stages)
    assert drawn(partial(StagedForward(stages, [images.device] * 2), images)).equal(alone)


def test_the_four_parts_of_a_batch_draw_the_same_whoever_takes_them() -> None:
    """And each something else in every step."""
    assert len({drawn(step=step, ranks=4, rank=rank) for step in range(3) for rank in range(4)}) == 12
    parts = [drawn(step=2, ranks=4, rank=rank) for rank in range(4)]
    assert [drawn(step=2, accumulation=4, batch=8 + number) for number in range(4)] == parts
    assert [drawn(step=2, place=place) for place in range(4)] == parts
    assert [drawn(step=2, accumulation=2, batch=n, ranks=2, rank=rank) for n in range(2) for rank in range(2)] == parts
    assert [drawn(step=2, place=place, ranks=2, rank=rank) for place in range(2) for rank in range(2)] == parts
