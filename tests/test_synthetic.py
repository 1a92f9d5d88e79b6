"""The data set that is drawn by code."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lit_cifar.data.synthetic import BLOCK, CLASSES, MAX_IMAGES, SHAPES, TEXTURES, Synthetic, draw
from lit_cifar.errors import ConfigError


def test_a_set_is_a_function_of_seed_and_split_and_begins_as_a_smaller_one() -> None:
    np_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    first, smaller = draw("train", num_images=700, seed=3), draw("train", num_images=BLOCK - 7, seed=3)
    for whole, part in zip(first, smaller, strict=True):
        assert torch.equal(whole[: BLOCK - 7], part)
    for other in (draw("train", num_images=700, seed=4), draw("test", num_images=700, seed=3)):
        assert not torch.equal(first[0], other[0])
        assert not torch.equal(first[1], other[1])
    assert (np.random.get_state()[1] == np_state).all()
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_every_image_is_another_and_classes_are_balanced_in_every_block() -> None:
    (train, labels), (test, _) = draw("train", num_images=4 * BLOCK), draw("test", num_images=1000)
    assert len({image.numpy().tobytes() for image in torch.cat([train, test])}) == 4 * BLOCK + 1000
    counts = torch.stack([torch.bincount(block, minlength=10) for block in labels.split(BLOCK)])
    assert (counts == BLOCK // len(set(CLASSES))).all()


def test_full_sizes_are_the_limit() -> None:
    assert MAX_IMAGES == {"train": 50_000, "test": 10_000}
    for split, num_images in (("train", 50_001), ("test", 10_001), ("train", 0), ("test", -1)):
        with pytest.raises(ConfigError, match=f"{num_images} {split} images asked of synthetic"):
            Synthetic(Path()).load(split, num_images=num_images)


def test_normalisation_statistics_are_those_of_the_images() -> None:
    pixels = draw("train", num_images=10 * BLOCK, seed=5)[0].double() / 255
    for found, said in ((pixels.mean((0, 2, 3)), Synthetic.mean), (pixels.std((0, 2, 3)), Synthetic.std)):
        torch.testing.assert_close(found, torch.tensor(said).double(), atol=4e-3, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("texture", "phase_across"), [("plain", None), ("rows", None), ("columns", 0), ("checks", 1), ("rings", None)]
)
def test_a_mirrored_image_is_of_the_same_class(shape: str, texture: str, phase_across: int | None) -> None:
    """Its mirror image is the same drawing with another phase, since sin(2 pi (p - x)) = sin(2 pi (x + 1/2 - p))."""
    y, x = np.float32([[[k] for k in range(-15, 16)]]), np.float32([[list(range(-15, 16))]])
    period, phase = 6.0, np.float32([0.2, 0.3]).reshape(2, 1, 1, 1)
    mask = SHAPES[shape](y, x, np.float32([[[9.0]]]))
    drawn = mask * TEXTURES[texture](y / period, x / period, phase)
    if phase_across is not None:
        phase[phase_across] = 0.5 - phase[phase_across]
    np.testing.assert_allclose(drawn[..., ::-1], mask * TEXTURES[texture](y / period, x / period, phase), atol=1e-5)
