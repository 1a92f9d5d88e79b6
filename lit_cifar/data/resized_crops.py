"""Windows of random size of many uint8 images at once, resized in integers: of pictures that are larger than asked."""

from functools import cache

import torch
from torch import Tensor


@cache
def window_sizes(side: int, device: torch.device) -> Tensor:
    """All heights and widths of windows in an image of `side` x `side`, int64, (k, 2), all equally likely.

    They have 0.08 to 1 of its area, and a ratio from 3/4 to 4/3. torchvision's RandomResizedCrop draws the area and the
    logarithm of the ratio uniformly, and both anew if the window does not fit: height and width are then uniform too,
    as the determinant of that change of variables is constant, 2 / side**2.
    """
    sizes = torch.cartesian_prod(*[torch.arange(1, side + 1)] * 2)
    heights, widths = sizes.T
    fits = (25 * heights * widths >= 2 * side * side) & (4 * heights >= 3 * widths) & (4 * widths >= 3 * heights)
    return sizes[fits].to(device)


def resized_crop(
    images: Tensor, rows: Tensor, columns: Tensor, heights: Tensor, widths: Tensor, mirrored: Tensor, *, size: int
) -> Tensor:
    """A window of each of the `images` (uint8, (n, C, H, W)), resized linearly: uint8, (n, C, size, size).

    Its first row and column, height and width are int64, (n,). `mirrored` (bool, (n,)) as for `crop`.
    """
    images = _resample(images, _places(rows, heights, size))
    places = _places(columns, widths, size)
    places = tuple(torch.where(mirrored[:, None], each.flip(1), each) for each in places)
    return _resample(images.transpose(2, 3), places).transpose(2, 3).contiguous()


def _places(starts: Tensor, lengths: Tensor, size: int) -> tuple[Tensor, ...]:
    """Places of the `size` new rows of a window among the old ones: three tensors, int64, (n, size).

    A new row lies between the old rows of the first two, as many 128ths of a row behind the first as the third says.
    """
    lengths = lengths[:, None]
    centres = (2 * torch.arange(size, device=starts.device) + 1) * lengths - size  # unit: a row / (2 * size)
    places = ((64 * centres + size // 2) // size).clamp(min=0).minimum(128 * (lengths - 1))
    first = places >> 7
    second = (first + 1).minimum(lengths - 1)
    return starts[:, None] + first, starts[:, None] + second, places & 127


def _resample(images: Tensor, places: tuple[Tensor, ...]) -> Tensor:
    """Interpolate the rows of `images` (uint8, (n, C, H, W)) in 16 bits, which the largest product just fills."""
    first, second, share = places
    all_rows = images.flatten(0, 2)
    of_image = images.shape[2] * torch.arange(images.shape[0] * images.shape[1], device=images.device)

    def rows(which: Tensor) -> Tensor:
        index = which.repeat_interleave(images.shape[1], 0) + of_image[:, None]
        shape = *images.shape[:2], *which.shape[1:], images.shape[3]
        return all_rows.index_select(0, index.flatten()).view(shape).short()

    above, below = rows(first), rows(second)
    change = below.sub_(above).mul_(share[:, None, :, None].short()).add_(64).bitwise_right_shift_(7)
    return change.add_(above).byte()
