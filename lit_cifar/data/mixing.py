"""Mixup and CutMix: each image of a global batch is mixed with the one before it there.

The step decides how, by (seed, epoch, step), and the partner is found by its position in the global batch. So a process
mixes its images with those of another one, and makes these itself, without a message.
"""

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from lit_cifar.data.counter_rng import Purpose, key_of
from lit_cifar.errors import bounded

_PARTS = 128  # a share is a whole number of them: 255 * 128 is within 16 bits


class Mix(NamedTuple):
    """How the images of one step are mixed."""

    share: float  # of an image itself; its partner has the rest
    box: tuple[slice, slice] | None = None  # rows and columns that are the partner's (CutMix)

    def __call__(self, images: Tensor, partners: Tensor) -> Tensor:
        """The mixed images, a new tensor; all uint8, (n, C, H, W). Mixup rounds to the nearest byte."""
        if self.box is not None:
            rows, columns = self.box
            mixed = images.clone()
            mixed[:, :, rows, columns] = partners[:, :, rows, columns]
            return mixed
        own = images.short()
        change = partners.short().sub_(own).mul_(round(_PARTS * (1 - self.share)))
        return change.add_(_PARTS // 2).bitwise_right_shift_(7).add_(own).byte()


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Mixup and CutMix of training images. With both, each step takes one of them with equal probability.

    Args:
        mixup: Mix each training image with another one of its global batch (Zhang et al., 2018): the parameter of the
            Beta distribution of their shares. With 0 there is no mixup. A loss must then be taken with `Batch.targets`.
        cutmix: Replace a rectangle of each training image by another's (Yun et al., 2019): the parameter, as above.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name, parameter in vars(self).items():
            bounded(f"--data.mixing.{name}", parameter, 0, 1000)

    def __bool__(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def draw(self, seed: int, *, epoch: int, step: int, size: tuple[int, int]) -> Mix:
        """Draw for the images, `size` (height, width), of optimizer step `step` of `epoch`."""
        random = Random(key_of(seed, epoch, int(Purpose.MIX), step) % 2**64)
        if self.mixup and (not self.cutmix or random.random() < 0.5):
            return Mix(round(_PARTS * random.betavariate(self.mixup, self.mixup)) / _PARTS)
        reach = (1 - random.betavariate(self.cutmix, self.cutmix)) ** 0.5 / 2  # from the centre, in units of a side
        centres = [(random.randrange(length), int(reach * length), length) for length in size]
        rows, columns = (slice(max(0, centre - half), min(length, centre + half)) for centre, half, length in centres)
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        return Mix(1 - area / (size[0] * size[1]), (rows, columns))


def soft_targets(
    mix: Mix | None, labels: Tensor, partners: Tensor, *, num_classes: int, weights: Tensor | None, whole: Tensor | None
) -> Tensor:
    """`Batch.soft_targets` for `labels` and those of their partners, int64, (n,).

    `weights` (float32, (num_classes,)) are factors of classes' losses, divided by their mean over `whole`, all labels.
    """
    classes = torch.arange(num_classes, device=labels.device)
    targets = (labels[:, None] == classes).float()
    if mix is not None:
        targets = mix.share * targets + (1 - mix.share) * (partners[:, None] == classes).float()
    if weights is not None:
        assert whole is not None
        # Partners are a permutation of the global batch, so mixing leaves this mean as it is.
        targets *= weights / weights[whole].double().mean().float()
    return targets
