"""The data path on the host, from uint8 images in memory to normalised batches, on one thread.

The baseline is the loop of Anthony Peng's articles on training with several GPUs, part 1, which stands in many
tutorials: PIL images through torchvision's transforms, in a DataLoader without workers.
Ours is what `fit` does between two steps: the loader with its augmentation, and the normalisation by the data module.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from time import thread_time
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.loader import BatchLoader
from lit_cifar.tools.bench.measurements import Quantiles, Report, Row, Settings, interleaved, ratio

_BATCH = 128
_NUM_IMAGES = 50_000  # as many as CIFAR-10 has, so that they fill no cache
_BASELINE_BATCHES = 16  # that are timed: an epoch would take minutes in all


def measure(settings: Settings, report: Report) -> list[Row]:
    """Images per second and core, of both, and what share the normalisation has of ours."""
    report("the data path on one thread")
    data = CIFAR10DataModule(
        dataset="synthetic", num_train=32 * _BATCH if settings.small else _NUM_IMAGES, val_size=0, batch_size=_BATCH
    )
    data.setup("fit")
    with one_thread():
        calls = paths(data)
        for warm_up in calls.values():
            warm_up()
        found = interleaved(calls, rounds=settings.rounds)
    per_second = {name: Quantiles(tuple(1 / seconds for seconds in own.values)) for name, own in found.items()}
    without = ratio(found["uint8"], found["ours"])
    of = partial(Row, section="data")
    return [
        of(
            name=f"uint8 images to normalised batches of {_BATCH} against PIL and a DataLoader, on one thread",
            unit="x",
            found=ratio(found["baseline"], found["ours"]),
        ),
        of(name="images per second, PIL and a DataLoader", unit="img/s", found=per_second["baseline"]),
        of(name="images per second, of `fit`", unit="img/s", found=per_second["ours"]),
        of(
            name="share of `fit`'s time in which batches become float32 and are normalised",
            unit="%",
            found=Quantiles(tuple(1 - share for share in without.values)),
            note="three passes over the 12 KB of an image: to float32, minus the mean, divided by the deviation",
        ),
    ]


def paths(data: CIFAR10DataModule) -> dict[str, Callable[[], float]]:
    """Functions that make batches of the training set of `data` and return the seconds that an image took.

    Returns:
        "baseline", a few batches; "ours", a whole epoch, as some of the work is done once in it; "uint8", an epoch of
        ours without the normalisation.
    """
    images, source = data.sets["train"], data.source
    through_pil = pil_loader(images, batch_size=data.batch_size, mean=source.mean, std=source.std)
    num_baseline = min(_BASELINE_BATCHES, len(through_pil)) * data.batch_size
    sampler = data.train_sampler()
    loader = BatchLoader(images, sampler, augmentation=data.augmentation)

    def epoch() -> Iterator[Batch]:
        sampler.set_epoch(sampler.epoch + 1)
        return iter(loader)

    return {
        "baseline": lambda: _seconds(islice(through_pil, _BASELINE_BATCHES)) / num_baseline,
        "ours": lambda: _seconds(data.on_after_batch_transfer(batch, 0) for batch in epoch()) / len(images),
        "uint8": lambda: _seconds(epoch()) / len(images),
    }


class PILImages(Dataset[tuple[Any, int]]):
    """Images one by one, as torchvision's own data sets give them: a PIL image goes through `transform`."""

    def __init__(self, images: ImageSet, transform: Callable[[Any], Any]) -> None:
        self._pixels = images.images.permute(0, 2, 3, 1).contiguous().numpy()
        self._labels = images.labels.tolist()
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(Image.fromarray(self._pixels[index])), self._labels[index]


def pil_loader(images: ImageSet, *, batch_size: int, mean: Any, std: Any) -> DataLoader[Any]:
    """Shuffled, cropped, flipped and normalised batches, made in this process."""
    size = images.images.shape[-1]
    steps = [transforms.RandomCrop(size, padding=4), transforms.RandomHorizontalFlip()]
    steps += [transforms.ToTensor(), transforms.Normalize(mean, std)]
    dataset = PILImages(images, transforms.Compose(steps))
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)


def _seconds(batches: Iterable[object]) -> float:
    """CPU time of this thread, which does all the work. A batch is held while the next is made, as in training."""
    start = thread_time()
    deque(batches, maxlen=1)
    return thread_time() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use a single thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
