"""Windows of padded images, on the host and on a GPU: two ways to the same bytes.

Both are made of `images`, uint8, (N, C, H, W), and the `padding` in pixels of black around each of them. Called with
the positions `ids` of n images, the first row and column of each one's window in its padded image, all int64, (n,), and
whether that window is mirrored left to right, bool, (n,), both return the windows, uint8, (n, C, H, W).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# Images that are mirrored at once, in memory that is used again: for all of them, getting it takes most of the time.
_FEW = 1000


class Crop(Protocol):
    @property
    def images(self) -> Tensor:
        """All of them, as they were handed in."""

    def __call__(self, ids: Tensor, rows: Tensor, columns: Tensor, mirrored: Tensor) -> Tensor: ...


class CropByCopy:
    """One copy of contiguous bytes for each window, and nothing is padded.

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


@dataclass(frozen=True)
class CropByGather:
    """All pixels at once, as a GPU does it; the host waits for nothing."""

    images: Tensor
    padding: int

    def __call__(self, ids: Tensor, rows: Tensor, columns: Tensor, mirrored: Tensor) -> Tensor:
        height, width = (torch.arange(length, device=ids.device) for length in self.images.shape[2:])
        rows, columns = rows[:, None] + height, columns[:, None] + width
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        samples = torch.arange(len(ids), device=ids.device)[:, None, None]
        padded = F.pad(self.images.index_select(0, ids), [self.padding] * 4)
        # Channels last, so that whole pixels are copied.
        pixels = padded.permute(0, 2, 3, 1).contiguous()[samples, rows[:, :, None], columns[:, None, :]]
        return pixels.permute(0, 3, 1, 2).contiguous()
