"""Data sets in memory: uint8 images and int64 labels, and the batches cut from them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageSet:
    """Labelled images in memory; `lit_cifar.data.pictures` has those that are decoded when they are needed."""

    images: Tensor  # uint8, (N, 3, height, width), RGB
    labels: Tensor  # int64, (N,), each in `range(len(classes))`
    classes: tuple[str, ...]  # names of the classes, by label
    are_encoded: ClassVar[bool] = False  # whether they are decoded whenever they are gathered

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, ids: Tensor) -> Tensor:
        """A copy of the pixels at positions `ids` (int64, (M,)), uint8, (M, 3, height, width)."""
        return self.images.index_select(0, ids)

    def packed(self, ids: Tensor) -> Any:
        """What a process without this object makes the images at positions `ids` from, by `unpack`."""
        return self.gather(ids).numpy()

    @property
    def unpack(self) -> Callable[[Any], Tensor]:
        return torch.from_numpy

    def in_memory(self, limit_gb: float | None, *, num_processes: int) -> "ImageSet":
        """The images in memory, unless they would take more than `limit_gb` there: `memory_gb` of the data module."""
        return self

    def subset(self, ids: Tensor) -> "ImageSet":
        """The images at positions `ids` (int64, (M,)), in that order."""
        return replace(self, images=self.gather(ids), labels=self.labels[ids])

    def to(self, device: torch.device) -> "ImageSet":
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


class Batch(NamedTuple):
    """One process's part of a global batch."""

    # (n, 3, height, width); uint8 from the loader, float and normalised once the data module has transferred it.
    images: Tensor
    labels: Tensor  # int64, (n,)
    ids: Tensor  # int64, (n,); positions in the `ImageSet` that the loader reads
    # Weight of this part's mean loss in the mean over replicas and accumulation steps: 1.0 in every full batch, `n *
    # parts / samples` in a ragged one, so that the result is the mean over the samples.
    weight: float
    # float32, (n, num_classes): how much of a sample's loss is the cross entropy with each class. None: all with its
    # label. In a mixed batch `labels` are those of the images that have the larger share.
    soft_targets: Tensor | None = None

    @property
    def targets(self) -> Tensor:
        return self.labels if self.soft_targets is None else self.soft_targets


def normalised(images: Tensor, *, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """The `images`, (n, 3, height, width), from uint8 to float32, in units of the channels' deviations."""
    means, deviations = (_channel_values(values, images.device) for values in (mean, std))
    return images.to(torch.float32, copy=True).sub_(means).div_(deviations)


@cache
def _channel_values(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Shares of the full range in units of a byte, (C, 1, 1). Cached: the host waits for a copy to a GPU."""
    return 255 * torch.tensor(values, device=device)[:, None, None]
