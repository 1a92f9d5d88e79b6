"""A loader for images that fit in memory: an index batch and one gather a step, on the host or on the GPU.

torch's DataLoader exists to hide slow decoding behind worker processes. 180 MB of uint8 images need no decoding: the
gather below feeds a GPU without any worker, and Lightning leaves an iterable that is no DataLoader as it is.
"""

from collections.abc import Iterator
from typing import Any

from lit_cifar.data.augment import Augmentation
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.samplers import EvaluationSampler, TrainSampler
from lit_cifar.errors import CheckpointError


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

    # By these two methods Lightning knows a loader that can go on in the middle of an epoch.

    def state_dict(self) -> dict[str, Any]:
        """Nothing: where training stands is for the writer of a checkpoint to say.

        A loader knows how many batches it has handed out, not how many have been trained on. Before an optimizer step
        these differ by one, after it they do not, and a limit on the batches of an epoch is unknown to it.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next epoch begin behind `state_dict["step"]` optimizer steps; without this entry, at its beginning.

        In optimizer steps, so that another number of processes or accumulation steps can go on.

        Raises:
            CheckpointError: The epoch has fewer steps.
        """
        assert isinstance(self.sampler, TrainSampler)  # Lightning goes on in the middle of no other epochs
        step, num_steps = state_dict.get("step", 0), self.sampler.num_batches
        if not 0 <= step <= num_steps:
            raise CheckpointError(
                f"the checkpoint was written after {step} optimizer steps of an epoch that has {num_steps} here",
                remedy="pass the --data.batch_size of the run that wrote it",
            )
        self.sampler.start = step
