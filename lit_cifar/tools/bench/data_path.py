"""The data path on the host, from uint8 images in memory to normalised batches, on one thread.

The baseline is the loop of Anthony Peng's articles on training with several GPUs, part 1, which stands in many
tutorials: PIL images through torchvision's transforms, in a DataLoader without workers.
Ours is what `fit` does between two steps: the loader with its augmentation, and the normalisation by the data module.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from time import thread_time
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import ImageSet
from lit_cifar.data.loader import BatchLoader
from lit_cifar.tools.bench import Row, Settings, interleaved

_BATCH = 128
_NUM_IMAGES = 50_000  # as many as CIFAR-10 has, so that they fill no cache
_BASELINE_BATCHES = 16  # that are timed: an epoch would take minutes in all


def measure(settings: Settings) -> list[Row]:
    """Images per second and core, of both."""
    data = CIFAR10DataModule(
        dataset="synthetic", num_train=32 * _BATCH if settings.small else _NUM_IMAGES, val_size=0, batch_size=_BATCH
    )
    data.setup("fit")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls = paths(data)
        for warm_up in calls.values():
            warm_up()
        found = interleaved(calls, rounds=settings.rounds)
    finally:
        torch.set_num_threads(threads)
    name = f"uint8 images to normalised batches of {_BATCH} against PIL and a DataLoader, on one thread"
    return [
        Row(name, "x", found["baseline"] / found["ours"]),
        Row("images per second, PIL and a DataLoader", "img/s", 1 / found["baseline"]),
        Row("images per second, of `fit`", "img/s", 1 / found["ours"]),
    ]


def paths(data: CIFAR10DataModule) -> dict[str, Callable[[], float]]:
    """Functions that make batches of the training set of `data` and return the seconds that an image took.

    Returns:
        "baseline", a few batches; "ours", a whole epoch, as some of the work is done once in it.
    """
    images, source = data.sets["train"], data.source
    through_pil = pil_loader(images, batch_size=data.batch_size, mean=source.mean, std=source.std)
    num_baseline = min(_BASELINE_BATCHES, len(through_pil)) * data.batch_size
    sampler = data.train_sampler()
    loader = BatchLoader(images, sampler, augmentation=data.augmentation)

    def epoch() -> float:
        sampler.set_epoch(sampler.epoch + 1)
        return _seconds(data.on_after_batch_transfer(batch, 0) for batch in loader) / len(images)

    return {"baseline": lambda: _seconds(islice(through_pil, _BASELINE_BATCHES)) / num_baseline, "ours": epoch}


def pil_loader(images: ImageSet, *, batch_size: int, mean: Any, std: Any) -> DataLoader[Any]:
    """Shuffled, cropped, flipped and normalised batches, made in this process."""
    steps = [transforms.RandomCrop(images.images.shape[-1], padding=4), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(mean, std)])

    def batch(samples: list[tuple[Any, int]]) -> Any:
        """As torchvision's own data sets do: each a PIL image first."""
        return default_collate([(transform(Image.fromarray(pixels)), label) for pixels, label in samples])

    pixels = images.images.permute(0, 2, 3, 1).contiguous().numpy()
    dataset: Any = list(zip(pixels, images.labels.tolist(), strict=True))
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=batch)


def _seconds(batches: Iterable[object]) -> float:
    """CPU time of this thread, which does all the work. A batch is held while the next is made, as in training."""
    start = thread_time()
    deque(batches, maxlen=1)
    return thread_time() - start
