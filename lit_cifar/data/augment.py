"""Pad-and-crop, flip and cutout of many uint8 images at once.

What happens to a sample is a function of (seed, epoch, sample id) alone, never of its rank, batch or device, and is
integer work throughout: the CPU and the GPU give the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_cifar.data.counter_rng import Purpose, keyed_integers
from lit_cifar.data.crops import Crop, CropByCopy, CropByGather


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The CIFAR recipe of He et al., "Deep residual learning", 2016, section 4.2, with optional cutout."""

    seed: int  # part of every draw's key
    padding: int = 4  # pixels of black added on each side before a window of the image's size is cropped
    flip: bool = True  # whether half of the images are mirrored left to right
    cutout: int = 0  # side in pixels of a black square at a random centre (DeVries and Taylor, 2017); 0 for none

    def draw(self, ids: Tensor, size: Sequence[int], *, epoch: int) -> Tensor:
        """What happens to the samples `ids` (int64, (n,)), of images of `size` (height, width), in `epoch`.

        Returns:
            A column for each sample, int64, (3, n): the first row and column of its window in the padded image, and
            whether that is mirrored. With cutout (5, n): the row and column of the square's centre too.
        """
        bounds = {
            Purpose.CROP_ROW: 2 * self.padding + 1,
            Purpose.CROP_COLUMN: 2 * self.padding + 1,
            Purpose.FLIP: 2 if self.flip else 1,
        }
        if self.cutout:
            bounds |= {Purpose.CUTOUT_ROW: size[0], Purpose.CUTOUT_COLUMN: size[1]}
        draws = [
            keyed_integers(ids, bound, seed=self.seed, epoch=epoch, purpose=purpose)
            for purpose, bound in bounds.items()
        ]
        return torch.stack(draws)


class AugmentedImages:
    """The `images` of a whole set (uint8, (N, 3, H, W)) as `augmentation` changes them, where they lie.

    Attributes:
        images: The same images in the memory that is read; those that were handed in are used no more.
    """

    def __init__(self, images: Tensor, augmentation: Augmentation) -> None:
        crop = CropByCopy if images.device.type == "cpu" else CropByGather
        self._crop: Crop = crop(images, augmentation.padding)
        self.images = self._crop.images
        self._size = images.shape[2:]
        self.augmentation = augmentation

    def draw(self, ids: Tensor, *, epoch: int) -> Tensor:
        """As `Augmentation.draw`; for a whole epoch at once it takes the least time."""
        return self.augmentation.draw(ids, self._size, epoch=epoch)

    def __call__(self, ids: Tensor, draws: Tensor) -> Tensor:
        """The images at positions `ids` (int64, (n,)) after their `draws`, a new uint8 tensor, (n, 3, H, W)."""
        rows, columns, mirrored, *centres = draws
        cropped = self._crop(ids, rows, columns, mirrored.bool())
        return cropped.masked_fill_(self._square(*centres)[:, None], 0) if centres else cropped

    def _square(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Which pixels cutout blackens, bool, (n, *size); a square may reach over the border."""
        height, width = self._size
        return self._side(rows, height)[:, :, None] & self._side(columns, width)[:, None, :]

    def _side(self, centres: Tensor, length: int) -> Tensor:
        start = centres[:, None] - self.augmentation.cutout // 2
        pixels = torch.arange(length, device=centres.device)
        return (pixels >= start) & (pixels < start + self.augmentation.cutout)
