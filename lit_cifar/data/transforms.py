"""Transforms of torchvision, or modules like them, of one image at a time.

Each image comes as a uint8 tensor (C, H, W), after crop and flip and before normalisation, as in torchvision's
references/classification/presets.py (https://github.com/pytorch/vision). What a transform draws from the global
generators is a function of the image's seed: the same on any process, in any block and after a resume.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from lit_cifar.errors import ConfigError, one_line

_TRIES = 8  # images on which transforms are tried: some do something to few images


def transformed(chain: Sequence[nn.Module], images: Tensor, seeds: Tensor) -> Tensor:
    """The `images` (uint8, (n, C, H, W), on the host) after each of `chain`, which draws by `seeds` (int64, (n,))."""
    found = torch.empty_like(images)
    with _generators_lent():
        for image, seed, place in zip(images, seeds.tolist(), found, strict=True):
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed the GPU's, too
            place.copy_(_after(chain, image))
    return found


def _after(chain: Sequence[nn.Module], image: Tensor) -> Tensor:
    found = image
    for transform in chain:
        found = transform(found)
    if not isinstance(found, Tensor) or (found.dtype, found.shape) != (image.dtype, image.shape):
        made = f"{found.dtype}, {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        problem = f"--data.augment.transforms: {_named(chain)} made {made} of {image.dtype}, {tuple(image.shape)}"
        raise ConfigError(problem, remedy="leave out what changes size or type; --data.image_size resizes images")
    return found


def check_transforms(chain: Sequence[nn.Module], size: int) -> None:
    """Refuse what is no transform of one image of `size` x `size` pixels."""
    images = torch.arange(_TRIES * 3 * size * size).mul(2654435761).bitwise_right_shift(7).byte()
    try:
        transformed(chain, images.view(_TRIES, 3, size, size), torch.arange(_TRIES))
    except ConfigError:
        raise
    except Exception as error:  # modules of anybody
        problem = f"{_named(chain)} cannot transform a uint8 tensor (3, {size}, {size}): {one_line(error)}"
        remedy = "pass transforms of one image; --data.mixing.mixup=1.0 or --data.mixing.cutmix=1.0 mixes a batch"
        raise ConfigError(f"--data.augment.transforms: {problem}", remedy=remedy) from error


def _named(chain: Sequence[nn.Module]) -> str:
    return ", ".join(type(transform).__name__ for transform in chain)


@contextmanager
def _generators_lent() -> Iterator[None]:
    """Leave the global generators as they were, and use one thread: sums of an image depend on how many share them."""
    of_python, of_numpy, num_threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(num_threads)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
