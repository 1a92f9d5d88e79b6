"""Pad-and-crop, flip and cutout of a whole uint8 batch at once.

What happens to a sample is a function of (seed, epoch, sample id) alone, never of its rank, batch or device, and is
integer work throughout: the CPU and the GPU give the same bytes.
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

    def __call__(self, images: Tensor, ids: Tensor, *, epoch: int) -> Tensor:
        """Augment `images` (uint8, (n, 3, H, W)) of the samples `ids` (int64, (n,)) into a new tensor like it."""
        size = images.shape[-2:]
        rows = self._draw(ids, 2 * self.padding + 1, Purpose.CROP_ROW, epoch)
        columns = self._draw(ids, 2 * self.padding + 1, Purpose.CROP_COLUMN, epoch)
        mirrored = self._draw(ids, 2 if self.flip else 1, Purpose.FLIP, epoch).bool()
        crop = crop_by_slices if images.device.type == "cpu" else crop_by_gather
        cropped = crop(F.pad(images, [self.padding] * 4), rows, columns, mirrored, size)
        return cropped.masked_fill_(self._square(ids, size, epoch)[:, None], 0) if self.cutout else cropped

    def _draw(self, ids: Tensor, bound: int, purpose: Purpose, epoch: int) -> Tensor:
        return keyed_integers(ids, bound, seed=self.seed, epoch=epoch, purpose=purpose)

    def _square(self, ids: Tensor, size: Sequence[int], epoch: int) -> Tensor:
        """Which pixels cutout blackens, bool, (n, *size); a square may reach over the border."""
        rows = self._side(ids, size[0], Purpose.CUTOUT_ROW, epoch)
        columns = self._side(ids, size[1], Purpose.CUTOUT_COLUMN, epoch)
        return rows[:, :, None] & columns[:, None, :]

    def _side(self, ids: Tensor, length: int, purpose: Purpose, epoch: int) -> Tensor:
        start = self._draw(ids, length, purpose, epoch)[:, None] - self.cutout // 2
        pixels = torch.arange(length, device=ids.device)
        return (pixels >= start) & (pixels < start + self.cutout)


# Two ways to the same bytes. Both take `padded`, uint8, (n, C, H, W); the first row and column of each image's window,
# int64, (n,); which windows are mirrored, bool, (n,); and the (height, width) of all windows.


def crop_by_slices(padded: Tensor, rows: Tensor, columns: Tensor, mirrored: Tensor, size: Sequence[int]) -> Tensor:
    """One copy for each image: on the host many times as fast as a gather of its pixels."""
    height, width = size
    cropped = padded.new_empty((*padded.shape[:2], height, width))
    draws = zip(rows.tolist(), columns.tolist(), mirrored.tolist(), strict=True)
    for target, image, (row, column, mirror) in zip(cropped.numpy(), padded.numpy(), draws, strict=True):
        window = image[:, row : row + height, column : column + width]
        target[...] = window[:, :, ::-1] if mirror else window
    return cropped


def crop_by_gather(padded: Tensor, rows: Tensor, columns: Tensor, mirrored: Tensor, size: Sequence[int]) -> Tensor:
    """All pixels at once, as a GPU does it; the host waits for nothing."""
    height, width = (torch.arange(length, device=padded.device) for length in size)
    rows, columns = rows[:, None] + height, columns[:, None] + width
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    samples = torch.arange(len(padded), device=padded.device)[:, None, None]
    # Channels last, so that whole pixels are copied.
    pixels = padded.permute(0, 2, 3, 1).contiguous()[samples, rows[:, :, None], columns[:, None, :]]
    return pixels.permute(0, 3, 1, 2).contiguous()
