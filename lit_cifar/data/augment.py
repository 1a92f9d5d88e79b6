"""Pad-and-crop, flip and cutout of many uint8 images at once.

What happens to a sample is a function of (seed, epoch, sample id) alone, never of its rank, batch or device, and is
integer work throughout: the CPU and the GPU give the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_cifar.data.counter_rng import Purpose, keyed_integers

# Images that are mirrored at once, in memory that is used again: for all of them, getting it takes most of the time.
_FEW = 1000


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
        crop = CropByCopy if images.device.type == "cpu" else CropByIndex
        self._crop: CropByCopy | CropByIndex = crop(images, augmentation.padding)
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


# Two ways to the same windows of padded images, uint8, (n, C, H, W). Both are called with the positions of the images,
# the first row and column of each one's window in its padded image, int64, (n,), and whether the window is mirrored.


@dataclass(frozen=True)
class CropByIndex:
    """All pixels at once, as a GPU does it; the host waits for nothing."""

    images: Tensor
    padding: int

    def __call__(self, ids: Tensor, rows: Tensor, columns: Tensor, mirrored: Tensor) -> Tensor:
        height, width = self.images.shape[2:]
        padded = F.pad(self.images.index_select(0, ids), [self.padding] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (n, C, rows, columns, H, W), a view
        cropped = windows[torch.arange(len(ids), device=ids.device), :, rows, columns]
        return torch.where(mirrored[:, None, None, None], cropped.flip(3), cropped)


class CropByCopy:
    """One copy of contiguous bytes for each window, ten times as fast on a CPU; nothing is padded.

    A window that lies d rows lower and e columns further to the right than its image is what begins d * W + e bytes
    behind the image in memory: row after row and plane after plane its own pixels, but for those beyond the image's
    border, where it has some of the next row or the next image. These are blackened afterwards, by a mask for each of
    the few places of a window.

    The images are copied and their mirror images laid beside them, as to mirror a window would take as long as to copy
    it. So they take twice their memory.

    Attributes:
        images: The copy, so that whoever handed them in can let go of them.
    """

    def __init__(self, images: Tensor, padding: int) -> None:
        self._shape, self._padding = images.shape[1:], padding
        height, width = images.shape[2:]
        margin = padding * (width + 1)  # what the windows of the first and the last image reach beyond them
        # By numpy, which asks the system for large pages: an image is found faster.
        self._memory = np.zeros(2 * images.numel() + 2 * margin, dtype=np.uint8)
        stored = torch.from_numpy(self._memory)[margin : margin + 2 * images.numel()].view(2, *images.shape)
        for some, copies, mirrored in zip(*(each.split(_FEW) for each in (images, *stored)), strict=True):
            copies.copy_(some)
            mirrored.copy_(some.flip(3))
        self.images = stored[0]
        inside = _inside(height, padding)[:, None, :, None] & _inside(width, padding)[None, :, None, :]
        self._masks = inside.flatten(end_dim=1).to(torch.uint8) * 255

    def __call__(self, ids: Tensor, rows: Tensor, columns: Tensor, mirrored: Tensor) -> Tensor:
        size, width = self._shape.numel(), self._shape[-1]
        # In the mirror image a window lies as far from the right as it lies from the left in the image.
        columns = torch.where(mirrored, 2 * self._padding - columns, columns)
        starts = (ids + mirrored * len(self.images)) * size + rows * width + columns
        # Every run of `size` bytes as one element. A view as long as this one must not be kept: copies of it are huge.
        windows = np.ndarray((self._memory.size - size + 1,), f"V{size}", self._memory, strides=(1,))
        cropped = torch.from_numpy(windows[starts.numpy()].view(np.uint8)).view(len(ids), *self._shape)
        masks = self._masks.index_select(0, rows * (2 * self._padding + 1) + columns)
        return cropped.bitwise_and_(masks[:, None])


def _inside(length: int, padding: int) -> Tensor:
    """Which pixels of a window lie in the image, by the window's place along one axis, bool, (places, length)."""
    pixels = torch.arange(2 * padding + 1)[:, None] - padding + torch.arange(length)
    return (pixels >= 0) & (pixels < length)
