"""Pad-and-crop, flip and cutout of many uint8 images at once.

What happens to a sample is a function of (seed, epoch, sample id) alone, never of its rank, batch or device, and is
integer work throughout: the CPU and the GPU give the same bytes, and the host waits for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_cifar.data.counter_rng import Purpose, keyed_integers


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The CIFAR recipe of He et al., "Deep residual learning", 2016, section 4.2, with optional cutout."""

    seed: int  # part of every draw's key
    padding: int = 4  # pixels of black added on each side before a window of the image's size is cropped
    flip: bool = True  # whether half of the images are mirrored left to right
    cutout: int = 0  # side in pixels of a black square at a random centre (DeVries and Taylor, 2017); 0 for none

    def draw(self, ids: Tensor, size: Sequence[int], *, epoch: int) -> Tensor:
        """What happens to the samples `ids` (int64, (n,)), of images of `size` (height, width), in `epoch`.

        For a whole epoch at once it takes the least time.

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

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """The `images` (uint8, (n, C, H, W)) after their `draws`, a new tensor of the same shape."""
        rows, columns, mirrored, *centres = draws
        cropped = crop(images, rows, columns, mirrored.bool(), padding=self.padding)
        if centres:
            cropped.masked_fill_(self._square(centres, images.shape[2:])[:, None], 0)
        return cropped

    def _square(self, centres: Sequence[Tensor], size: Sequence[int]) -> Tensor:
        """Which pixels cutout blackens, bool, (n, *size); a square may reach over the border."""
        rows, columns = map(self._side, centres, size)
        return rows[:, :, None] & columns[:, None, :]

    def _side(self, centres: Tensor, length: int) -> Tensor:
        start = centres[:, None] - self.cutout // 2
        pixels = torch.arange(length, device=centres.device)
        return (pixels >= start) & (pixels < start + self.cutout)


def crop(images: Tensor, rows: Tensor, columns: Tensor, mirrored: Tensor, *, padding: int) -> Tensor:
    """A window of each of the padded `images`, uint8, (n, C, H, W).

    `rows` and `columns` (int64, (n,)) are where it begins in the padded image, `mirrored` (bool, (n,)) whether it is
    mirrored left to right.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, [padding] * 4)
    down, across = (torch.arange(length, device=images.device) for length in (height, width))
    across = torch.where(mirrored[:, None], width - 1 - across, across)
    # The place of each pixel of a window in its padded image, the same in every channel.
    places = (rows[:, None] + down)[:, :, None] * padded.shape[3] + (columns[:, None] + across)[:, None, :]
    places = places.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return padded.flatten(2).gather(2, places).view(images.shape)
