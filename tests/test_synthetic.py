from pathlib import Path

import numpy as np
import pytest
import torch

from lit_cifar.data import CIFAR10DataModule, synthetic
from lit_cifar.data.sources import open_dataset
from lit_cifar.data.synthetic import BLOCK, CLASSES, MAX_IMAGES, Synthetic, draw
from lit_cifar.errors import ConfigError


def test_images_and_labels_have_the_documented_form():
    images, labels = draw("train", num_images=1234)
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (1234, 3, 32, 32))
    assert (labels.dtype, tuple(labels.shape)) == (torch.int64, (1234,))
    assert images.is_contiguous()
    assert len(set(CLASSES)) == 10


def test_a_set_is_a_function_of_seed_and_split():
    first, again = draw("train", num_images=700, seed=3), draw("train", num_images=700, seed=3)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    for other in (draw("train", num_images=700, seed=4), draw("test", num_images=700, seed=3)):
        assert not torch.equal(first[0], other[0])
        assert not torch.equal(first[1], other[1])


def test_a_smaller_set_is_the_beginning_of_a_larger_one():
    large, small = draw("test", num_images=2 * BLOCK + 1, seed=1), draw("test", num_images=BLOCK - 7, seed=1)
    assert torch.equal(large[0][: BLOCK - 7], small[0])
    assert torch.equal(large[1][: BLOCK - 7], small[1])


def test_every_image_is_another_within_and_across_splits():
    drawn = torch.cat([draw("train", num_images=2000)[0], draw("test", num_images=1000)[0]])
    assert len({image.numpy().tobytes() for image in drawn}) == 3000


def test_classes_are_balanced_in_every_block():
    _, labels = draw("train", num_images=4 * BLOCK)
    counts = torch.stack([torch.bincount(block, minlength=10) for block in labels.split(BLOCK)])
    assert (counts == BLOCK // 10).all()


def test_global_generators_are_left_alone():
    np_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    draw("train", num_images=10)
    assert (np.random.get_state()[1] == np_state).all()
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_full_sizes_are_the_limit():
    assert MAX_IMAGES == {"train": 50_000, "test": 10_000}
    assert len(Synthetic(Path()).load("test")) == 10_000
    for split, num_images in (("train", 50_001), ("test", 10_001), ("train", 0), ("test", -1)):
        with pytest.raises(ConfigError, match=f"{num_images} {split} images asked of synthetic"):
            Synthetic(Path()).load(split, num_images=num_images)


def test_a_negative_seed_is_refused():
    with pytest.raises(ConfigError, match=r"--data\.seed=-1: sizes and seeds are not negative"):
        CIFAR10DataModule(dataset="synthetic", seed=-1)


def test_normalisation_statistics_are_those_of_the_images():
    info = open_dataset("synthetic", "nowhere")
    pixels = draw("train", num_images=10 * BLOCK, seed=5)[0].double() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(info.mean).double(), atol=4e-3, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(info.std).double(), atol=4e-3, rtol=0)


@pytest.mark.parametrize("shape", [synthetic._disc, synthetic._cross])
@pytest.mark.parametrize(
    ("texture", "phase_across"),
    [
        (synthetic._plain, None),
        (synthetic._rows, None),
        (synthetic._columns, 0),
        (synthetic._checks, 1),
        (synthetic._rings, None),
    ],
)
def test_a_mirrored_image_is_of_the_same_class(shape, texture, phase_across):
    """Its mirror image is the same drawing with another phase, since sin(2 pi (p - x)) = sin(2 pi (x + 1/2 - p))."""
    y, x = np.float32([[[k] for k in range(-15, 16)]]), np.float32([[list(range(-15, 16))]])
    radius, period, phase = np.float32([[[9.0]]]), 6.0, np.float32([0.2, 0.3]).reshape(2, 1, 1, 1)
    drawn = shape(y, x, radius) * texture(y / period, x / period, phase)
    if phase_across is not None:
        phase[phase_across] = 0.5 - phase[phase_across]
    expected = shape(y, x, radius) * texture(y / period, x / period, phase)
    np.testing.assert_allclose(drawn[..., ::-1], expected, atol=1e-5)


def test_the_classes_are_in_the_textures_not_in_where_pixels_are_bright():
    images, labels = draw("train", num_images=1000)
    test_images, test_labels = draw("test", num_images=1000)
    pixels, test_pixels = (_normalised(x).flatten(1) for x in (images, test_images))
    # Ridge regression on the pixels, solved exactly in its dual form.
    gram = pixels @ pixels.T + 3e3 * torch.eye(len(pixels))
    weights = torch.linalg.solve(gram, torch.nn.functional.one_hot(labels, 10).float())
    linear = ((test_pixels @ pixels.T @ weights).argmax(1) == test_labels).float().mean()
    # How strongly neighbours differ down and across, and their product: three numbers tell the textures apart.
    features, test_features = _edge_energy(images), _edge_energy(test_images)
    centres = torch.stack([features[labels % 5 == k].mean(0) for k in range(5)])
    spread = features.std(0)
    nearest = torch.cdist(test_features / spread, centres / spread).argmin(1)
    texture = (nearest == test_labels % 5).float().mean()
    assert linear < 0.5
    assert texture > 0.6


def _normalised(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 255 - 0.376


def _edge_energy(images: torch.Tensor) -> torch.Tensor:
    grey = images.float().mean(1)
    down, across = grey.diff(dim=1).abs().mean((1, 2)), grey.diff(dim=2).abs().mean((1, 2))
    both = grey.diff(dim=1).diff(dim=2).abs().mean((1, 2))
    return torch.stack([down, across, both], 1).log()
