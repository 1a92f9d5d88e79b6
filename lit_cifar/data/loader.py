"""A loader that makes batches of the images of a split, where they lie.

torch's DataLoader hides slow decoding behind worker processes. uint8 images in memory need none: one gather for some
batches, on the host or on the GPU, feeds a GPU without any worker (`workers` has some, for what takes longer).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lit_cifar.data.augment import Augmentation
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.mixing import Mixing, soft_targets
from lit_cifar.data.samplers import BatchIds, EvaluationSampler, TrainSampler
from lit_cifar.data.workers import made_by_workers
from lit_cifar.errors import CheckpointError

# Number of 32 x 32 images made at a time, fewer if larger: the fastest tried on the host, and enough for a GPU.
_BLOCK_ON_HOST, _BLOCK_ON_DEVICE = 1024, 16384


class BatchLoader:
    """Iterates over this process's batches of `images`. Lightning calls `set_epoch` of the `sampler`, if it has one."""

    batch_sampler = None  # Lightning reads this of any object with a `sampler`

    def __init__(
        self,
        images: ImageSet,
        sampler: TrainSampler | EvaluationSampler,
        *,
        augmentation: Augmentation | None = None,
        mixing: Mixing | None = None,
        class_weights: Tensor | None = None,
        num_workers: int = 0,
    ) -> None:
        """`num_workers` is the number of processes that make images; with 0 this one does."""
        self.images, self.sampler, self._augmentation = images, sampler, augmentation
        self._mixing, self._num_workers = mixing, num_workers
        self._class_weights = None if class_weights is None else class_weights.to(images.images.device)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        if not (parts := list(self.sampler)):
            return
        # A process that has not all of a batch makes the images with which it mixes its own: the second of each pair.
        apart = self._mixing is not None and any(len(part.ids) < len(part.keys) for part in parts)
        needed = [keys for part in parts for keys in (part.keys[part.place], part.partners)[: 1 + apart]]
        sizes = [len(keys) for keys in needed]
        keys = torch.cat(needed).to(self.images.images.device, non_blocking=True)
        ids = keys % len(self.images)
        labels = torch.split(self.images.labels.index_select(0, ids), sizes)
        made = zip(self._images(ids, keys, sizes), labels, torch.split(ids, sizes), strict=True)
        is_soft = self._mixing is not None or self._class_weights is not None
        for part in parts:
            batch = Batch(*next(made), part.weight)
            partners = next(made)[:2] if apart else None
            yield self._softened(batch, part, partners) if is_soft else batch

    def _softened(self, batch: Batch, part: BatchIds, partners: tuple[Tensor, Tensor] | None) -> Batch:
        """The batch with soft targets, and mixed if that is wanted: with these images and labels, or with its own."""
        mix, labels, others, whole = None, batch.labels, batch.labels, None
        if self._mixing is not None:
            images, others = partners or (batch.images.roll(1, 0), labels.roll(1))
            height, width = images.shape[2:]
            assert isinstance(self.sampler, TrainSampler)  # an evaluation mixes nothing
            mix = self._mixing.draw(self.sampler.seed, epoch=self.sampler.epoch, step=part.step, size=(height, width))
            batch = batch._replace(images=mix(batch.images, images))
        if self._class_weights is not None:
            whole = self.images.labels[part.keys.to(labels.device, non_blocking=True) % len(self.images)]
        classes, weights = len(self.images.classes), self._class_weights
        soft = soft_targets(mix, labels, others, num_classes=classes, weights=weights, whole=whole)
        return batch._replace(labels=labels if mix is None or mix.share >= 0.5 else others, soft_targets=soft)

    def _images(self, ids: Tensor, keys: Tensor, sizes: list[int]) -> Iterator[Tensor]:
        """The images of each batch, made in blocks, because one image takes as many operators as 1000."""
        num_images = _BLOCK_ON_HOST if ids.device.type == "cpu" else _BLOCK_ON_DEVICE
        num_images = num_images * 32 * 32 // self.images.images.shape[2:].numel()
        length = max(1, num_images // max(1, *sizes))  # batches of a block
        blocks = [sizes[start : start + length] for start in range(0, len(sizes), length)]
        of_blocks = torch.split(ids, [sum(block) for block in blocks])
        augment, draws = self._augmentation, None
        if augment is not None:
            draws = augment.draw(keys, self.images.images.shape[2:], epoch=self.sampler.epoch)
        if self._num_workers:
            made = made_by_workers(self.images, of_blocks, draws, augment=augment, num_workers=self._num_workers)
        else:
            made = map(self.images.gather, of_blocks)
            if augment is not None and draws is not None:
                made = map(augment, made, torch.split(draws, [len(part) for part in of_blocks], dim=1))
        for block, images in zip(blocks, made, strict=True):
            yield from torch.split(images, block)

    # By these two methods Lightning knows a loader that can go on in the middle of an epoch.

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a loader knows how many batches it has handed out, not how many have been trained on."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse to resume if the sampler cannot ask the Trainer where it is."""
        if isinstance(self.sampler, TrainSampler) and self.sampler.behind is None:
            problem = "a loader of a data module that has no Trainer cannot begin in the middle of an epoch"
            raise CheckpointError(problem, remedy="pass the data module itself: trainer.fit(model, datamodule=data)")
