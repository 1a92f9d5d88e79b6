"""Transforms of torchvision and modules like them: drawn by sample, whatever process, block or worker takes it."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torchvision.transforms import v2

from lit_cifar import CIFAR10DataModule, ConfigError
from lit_cifar.data import Augment, Balance, Mixing
from lit_cifar.data.augment import Augmentation
from lit_cifar.data.counter_rng import Purpose, keyed_integers
from lit_cifar.data.images import Batch
from lit_cifar.data.sample_order import augment_settings
from lit_cifar.data.transforms import transformed

IMAGES = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class DrawsEverywhere(nn.Module):
    """Writes into the first pixels what it draws from three generators, and the number of threads that it has."""

    def forward(self, image: Tensor) -> Tensor:
        self.used = True
        drawn = [random.randrange(256), np.random.randint(256), int(torch.randint(256, ())), torch.get_num_threads()]
        made = image.clone()
        made[0, 0, :4] = torch.tensor(drawn)
        return made


def test_an_image_is_that_of_torchvision_after_crop_and_flip_and_before_cutout() -> None:
    chain = [v2.TrivialAugmentWide(), v2.RandomErasing(0.5)]
    plain = Augmentation(seed=4)
    augmentation = Augmentation(seed=4, transforms=chain, cutout=8)
    keys = torch.arange(64)
    cropped = plain(IMAGES, plain.draw(keys, (32, 32), epoch=2))
    found = augmentation(IMAGES, augmentation.draw(keys, (32, 32), epoch=2))
    seeds = keyed_integers(keys, 2**31, seed=4, epoch=2, purpose=Purpose.TRANSFORMS)
    expected = []
    with torch.random.fork_rng(devices=[]):
        for image, seed in zip(cropped, seeds.tolist(), strict=True):
            torch.manual_seed(seed)
            expected.append(chain[1](chain[0](image)))
    same = found == torch.stack(expected)
    assert (same | (found == 0)).all()  # what differs is the black square
    assert same.float().mean() > 0.9
    assert not torch.stack(expected).equal(cropped)


def test_all_generators_are_seeded_by_sample_and_left_as_they_were() -> None:
    threads = torch.get_num_threads()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    try:
        torch.set_num_threads(2)
        first, other, again = transformed([DrawsEverywhere()], IMAGES[[0, 0, 0]], torch.tensor([7, 8, 7]))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert first.equal(again)
    assert (first != other)[0, 0, :3].all()
    assert first[0, 0, 3] == 1
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert before == after


@pytest.mark.parametrize("settings", [{"cutout": 8}, {"transforms": [v2.RandAugment(), v2.ColorJitter(0.4, hue=0.1)]}])
def test_a_sample_is_augmented_alike_in_any_block_and_otherwise_in_another_epoch(settings: dict[str, Any]) -> None:
    keys = torch.randperm(64)

    def made(keys: Tensor, *, seed: int = 4, epoch: int = 2, turn: int = 0) -> Tensor:
        augmentation = Augmentation(seed=seed, **settings)
        return augmentation(IMAGES[keys], augmentation.draw(keys + 64 * turn, (32, 32), epoch=epoch))

    whole = made(keys)
    for num_parts in (2, 5, 64):
        for part in keys.chunk(num_parts):
            assert made(part).equal(whole[torch.isin(keys, part)])
    assert made(keys.flip(0)).equal(whole.flip(0))
    for other in ({"epoch": 3}, {"seed": 5}, {"turn": 1}):
        assert not made(keys, **other).equal(whole)
    assert made(keys[:0]).shape == whole[:0].shape


def batches(**settings: Any) -> list[Batch]:
    data = CIFAR10DataModule(dataset="synthetic", num_train=300, batch_size=64, **settings)
    data.setup("fit")
    train = data.train_dataloader()
    train.sampler.set_epoch(1)
    return list(train)


@pytest.mark.xdist_group("test_workers")  # where the fork server is
@pytest.mark.parametrize("settings", [{}, {"mixing": Mixing(mixup=1.0)}])
def test_workers_make_the_same_batches(settings: dict[str, Any]) -> None:
    augment = Augment(transforms=[v2.TrivialAugmentWide(), DrawsEverywhere()])
    here, there = (batches(augment=augment, num_workers=number, **settings) for number in (0, 2))
    assert len(here) == len(there) == 5
    for ours, theirs in zip(here, there, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours[:3], theirs[:3], strict=True))
        assert ours.images.stride() == theirs.images.stride()


def test_images_that_a_balanced_epoch_repeats_are_drawn_anew() -> None:
    sizes = {"num_train": 200, "val_size": 0, "batch_size": 64}
    data = CIFAR10DataModule(dataset="synthetic", balance=Balance(draw_equally=True), **sizes)
    data.setup("fit")
    kept = torch.cat([torch.nonzero(data.sets["train"].labels > 0)[:, 0], torch.tensor([0])])
    data.sets["train"] = data.sets["train"].subset(kept)
    data.sets["train"].labels[-1] = 0  # one of its class
    of_rare = [batch.images[batch.ids == len(kept) - 1] for batch in data.train_dataloader()]
    images = torch.cat(of_rare)
    assert len(images) > 10
    assert len({image.numpy().tobytes() for image in images}) > 12  # of 162 crops and flips


def test_transforms_differ_by_what_they_hold_and_not_by_what_they_find() -> None:
    def made(p: float) -> list[nn.Module]:
        sometimes = v2.RandomApply([v2.ColorJitter(0.4)], p=p)
        nested = v2.Compose([v2.RandomChoice([sometimes, v2.Identity()])]), nn.Sequential(nn.Identity(), sometimes)
        shy = v2.Lambda(record_function(f"{p}")), nn.Embedding.from_pretrained(torch.full((1, 2000), p))
        return [sometimes, *nested, *shy, v2.RandomAffine(0, fill={Tensor: p})]

    for transforms in zip(made(0.3), made(0.3), made(0.4), strict=True):
        ours, same, other = (augment_settings(Augment(transforms=[transform])) for transform in transforms)
        assert ours == same != other
    augment = Augment(transforms=[DrawsEverywhere()])
    before = augment_settings(augment)
    assert CIFAR10DataModule(dataset="synthetic", augment=augment).augment_settings == before
    assert augment_settings(augment) != before


def test_a_change_of_size_that_is_seen_late_ends_the_run_too() -> None:
    rarely = v2.RandomApply([v2.Resize(16)], p=0.5)
    with pytest.raises(ConfigError, match=r"RandomApply made torch\.uint8, \(3, 16, 16\)"):
        transformed([rarely], IMAGES, torch.arange(64))
