"""Pad-and-crop, flip and cutout of a whole uint8 batch at once.

What happens to a sample is a function of (seed, epoch, sample id) alone, never of its rank, batch or device, and is
integer work throughout: the CPU and the GPU give the same bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_cifar.data.keyed import Purpose, keyed_integers


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The CIFAR recipe of He et al., "Deep residual learning", 2016, section 4.2, with optional cutout.

    Attributes:
        seed: Part of every draw's key.
        padding: Pixels of black added on each side before a 32 x 32 window is cropped.
        flip: Whether half of the images are mirrored left to right.
        cutout: Side in pixels of a black square at a random centre (DeVries and Taylor, 2017); 0 for none.
    """

    seed: int
    padding: int = 4
    flip: bool = True
    cutout: int = 0

    def __call__(self, images: Tensor, ids: Tensor, *, epoch: int) -> Tensor:
        """Augment `images` (uint8, (n, 3, H, W)) of the samples `ids` (int64, (n,)) into a new tensor like it."""
        height, width = images.shape[-2:]
        rows = self._window(ids, height, Purpose.CROP_ROW, epoch)
        columns = self._window(ids, width, Purpose.CROP_COLUMN, epoch)
        if self.flip:
            mirrored = self._draw(ids, 2, Purpose.FLIP, epoch).bool()
            columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        # Channels last, so that the gather below copies whole pixels.
        padded = F.pad(images, [self.padding] * 4).permute(0, 2, 3, 1).contiguous()
        samples = torch.arange(len(ids), device=ids.device)
        cropped = padded[samples[:, None, None], rows[:, :, None], columns[:, None, :]]
        if self.cutout:
            cropped = cropped.masked_fill(self._square(ids, height, width, epoch)[..., None], 0)
        return cropped.permute(0, 3, 1, 2).contiguous()

    def _draw(self, ids: Tensor, bound: int, purpose: Purpose, epoch: int) -> Tensor:
        return keyed_integers(ids, bound, seed=self.seed, epoch=epoch, purpose=purpose)

    def _window(self, ids: Tensor, length: int, purpose: Purpose, epoch: int) -> Tensor:
        """The `length` padded positions that each sample keeps along one axis, int64, (n, length)."""
        offsets = self._draw(ids, 2 * self.padding + 1, purpose, epoch)
        return offsets[:, None] + torch.arange(length, device=ids.device)

    def _square(self, ids: Tensor, height: int, width: int, epoch: int) -> Tensor:
        """Which pixels cutout blackens, bool, (n, height, width); a square may reach over the border."""
        rows = self._side(ids, height, Purpose.CUTOUT_ROW, epoch)
        columns = self._side(ids, width, Purpose.CUTOUT_COLUMN, epoch)
        return rows[:, :, None] & columns[:, None, :]

    def _side(self, ids: Tensor, length: int, purpose: Purpose, epoch: int) -> Tensor:
        start = self._draw(ids, length, purpose, epoch)[:, None] - self.cutout // 2
        pixels = torch.arange(length, device=ids.device)
        return (pixels >= start) & (pixels < start + self.cutout)
