"""The data path on the host, from uint8 images in memory to normalised batches, on one thread.

The baseline is the loop of the articles: PIL images through torchvision's transforms, in a DataLoader without workers.
Ours is what `fit` does between two steps: the loader with its augmentation, and the normalisation by the data module.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from time import thread_time

import torch

from lit_cifar.bench import baseline
from lit_cifar.bench.rows import Row
from lit_cifar.bench.settings import Report, Settings
from lit_cifar.bench.timing import Spread, measured_in_turn, ratio
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.data.loader import BatchLoader

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
        found = measured_in_turn(calls, rounds=settings.rounds)
    of = partial(Row, section="data")
    return [
        of(
            name=f"uint8 images to normalised batches of {_BATCH} against PIL and a DataLoader, on one thread",
            unit="x",
            found=ratio(found["baseline"], found["ours"]),
        ),
        of(name="images per second, PIL and a DataLoader", unit="img/s", found=_per_second(found["baseline"])),
        of(name="images per second, of `fit`", unit="img/s", found=_per_second(found["ours"])),
        of(
            name="share of `fit`'s time in which batches become float32 and are normalised",
            unit="%",
            found=_rest(ratio(found["uint8"], found["ours"])),
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
    through_pil = baseline.loader(images, batch_size=data.batch_size, mean=source.mean, std=source.std)
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


def _seconds(batches: Iterable[object]) -> float:
    """CPU time of this thread, which does all the work. A batch is held while the next is made, as in training."""
    start = thread_time()
    deque(batches, maxlen=1)
    return thread_time() - start


def _per_second(seconds: Spread) -> Spread:
    return Spread(tuple(1 / value for value in seconds.values))


def _rest(share: Spread) -> Spread:
    return Spread(tuple(1 - value for value in share.values))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use a single thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
