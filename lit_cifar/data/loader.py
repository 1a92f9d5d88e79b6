"""A loader for images that fit in memory: an index batch and one gather a step, on the host or on the GPU.

torch's DataLoader exists to hide slow decoding behind worker processes. 180 MB of uint8 images need no decoding: the
gather below feeds a GPU without any worker, and Lightning leaves an iterable that is no DataLoader as it is.
"""

from collections.abc import Iterator

from lit_cifar.data.augment import Augmentation
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.samplers import EvaluationSampler, TrainSampler


class BatchLoader:
    """Iterates over this process's batches of `images`, where these lie.

    Args:
        images: The data set, on the device where batches shall be made.
        sampler: Says which ids each batch holds. Lightning finds it here and calls its `set_epoch`, if it has one.
        augmentation: Applied to every batch, or None.
    """

    batch_sampler = None  # Lightning asks whatever has a `sampler` for this one too

    def __init__(
        self,
        images: ImageSet,
        sampler: TrainSampler | EvaluationSampler,
        *,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.images = images
        self.sampler = sampler
        self.augmentation = augmentation

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        epoch = getattr(self.sampler, "epoch", 0)
        device = self.images.images.device
        for ids, weight in self.sampler:
            ids = ids.to(device, non_blocking=True)
            images = self.images.images[ids]
            if self.augmentation is not None:
                images = self.augmentation(images, ids, epoch=epoch)
            yield Batch(images, self.images.labels[ids], ids, weight)
