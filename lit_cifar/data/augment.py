"""Crops, flips and cutout of many uint8 images at once, and between them the transforms that a user names.

What happens to a sample is a function of (seed, epoch, key) alone, never of its rank, batch or device. Its key is its
id, or another number where an epoch uses it again (`TrainSampler.keys`). Without transforms all values are
whole numbers: the CPU and the GPU give the same bytes, and the host waits for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.data.counter_rng import Purpose, keyed_integers
from lit_cifar.data.transforms import check_transforms, transformed
from lit_cifar.errors import ConfigError, bounded


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What training images go through, in this order.

    Args:
        padding: Pixels that are added on each side before a window of the image's size is cropped at random.
        reflect: Let the added pixels mirror those inside. With false they are black.
        alternate_flips: Mirror a random half of the images in the first epoch, the other half in the second, and so on
            (Jordan, 2024, https://arxiv.org/abs/2404.00498). With false each epoch draws a new half.
        transforms: Modules that then change an image, uint8 (3, height, width): torchvision.transforms.v2, or your own.
        cutout: Side of a random black square, in pixels. With 0 there is none.
    """

    padding: int = 4
    reflect: bool = True
    alternate_flips: bool = True
    transforms: list[nn.Module] = field(default_factory=list)
    cutout: int = 0

    def of_images(self, size: int, *, seed: int) -> "Augmentation":
        """The augmentation of images of `size` x `size` pixels."""
        bounded("--data.augment.padding", self.padding, 0, needed=True)
        bounded("--data.augment.cutout", self.cutout, 0, needed=True)
        if self.reflect and self.padding >= size:
            remedy = "lower --data.augment.padding, or pass --data.augment.reflect=false"
            raise ConfigError("--data.augment.reflect=true has too few pixels to mirror", remedy=remedy)
        if self.transforms:
            check_transforms(self.transforms, size)
        return Augmentation(**vars(self), seed=seed)


@dataclass(frozen=True, kw_only=True)
class Augmentation(Augment):
    """The crops and flips of He et al., "Deep residual learning", 2016, section 4.2, as `Augment` changes them.

    Cutout is by DeVries and Taylor, 2017.
    """

    seed: int  # a part of every draw's key

    def draw(self, keys: Tensor, size: Sequence[int], *, epoch: int) -> Tensor:
        """Draw the augmentation in `epoch` of samples by their `keys` (int64, (n,)), images of `size` (height, width).

        Returns:
            A column for each sample, int64, (3, n): the first row and column of its window in the padded image, and
            whether that is mirrored. With transforms one more: their seed. With cutout two more: the square's centre.
        """

        def pick(purpose: Purpose, bound: int, epoch: int = epoch) -> Tensor:
            return keyed_integers(keys, bound, seed=self.seed, epoch=epoch, purpose=purpose)

        places = 2 * self.padding + 1
        mirrored = pick(Purpose.FLIP, 2, 0) ^ (epoch & 1) if self.alternate_flips else pick(Purpose.FLIP, 2)
        draws = [pick(Purpose.CROP_ROW, places), pick(Purpose.CROP_COLUMN, places), mirrored]
        if self.transforms:
            draws.append(pick(Purpose.TRANSFORMS, 2**31))
        if self.cutout:
            draws += [pick(Purpose.CUTOUT_ROW, size[0]), pick(Purpose.CUTOUT_COLUMN, size[1])]
        return torch.stack(draws)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """The `images` (uint8, (n, C, H, W)) after their `draws`, a new tensor of the same shape."""
        rows, columns, mirrored, *rest = draws
        made = crop(images, rows, columns, mirrored.bool(), padding=self.padding, reflect=self.reflect)
        if self.transforms:
            seeds, *rest = rest
            made = transformed(self.transforms, made, seeds)
        if self.cutout:
            blacken(made, *(centre - self.cutout // 2 for centre in rest), side=self.cutout)
        return made


def crop(images: Tensor, rows: Tensor, columns: Tensor, mirrored: Tensor, *, padding: int, reflect: bool) -> Tensor:
    """A window of each of the padded `images`, uint8, (n, C, H, W), which begins at `rows` and `columns`, int64, (n,).

    `mirrored`, bool, (n,), is whether it is mirrored left to right.
    """
    height, width = images.shape[2:]
    # F.pad takes no uint8 to mirror.
    padded = F.pad(images.float(), [padding] * 4, "reflect").byte() if reflect else F.pad(images, [padding] * 4)
    down, across = (torch.arange(length, device=images.device) for length in (height, width))
    across = torch.where(mirrored[:, None], width - 1 - across, across)
    # The place of each pixel of a window in its padded image, the same in every channel.
    places = (rows[:, None] + down)[:, :, None] * padded.shape[3] + (columns[:, None] + across)[:, None, :]
    places = places.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return padded.flatten(2).gather(2, places).view(images.shape)


def blacken(images: Tensor, rows: Tensor, columns: Tensor, *, side: int) -> None:
    """Make a square of each of the `images` black, in place; it may reach over the border. Others are int64, (n,)."""
    inside = []
    for start, length in (rows, images.shape[2]), (columns, images.shape[3]):
        pixels = torch.arange(length, device=images.device)
        inside.append((pixels >= start[:, None]) & (pixels < start[:, None] + side))
    down, across = inside
    images.mul_(~(down[:, :, None] & across[:, None, :])[:, None])
