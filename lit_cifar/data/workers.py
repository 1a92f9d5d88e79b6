"""Worker processes that make the next images while others are trained on: they decode pictures, or transform images.

Each process that trains has workers of its own, for one epoch or evaluation. They are forked from a server that has the
imports and nothing else: no threads, no connections of the process group, nothing of CUDA.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process, set_forkserver_preload
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_cifar.data.images import ImageSet
from lit_cifar.errors import ConfigError
from lit_cifar.launch.malloc_tuning import return_freed_memory

_CHUNK = 32  # images that a worker makes at a time
_PRELOADED = ["lit_cifar.launch.fork_server", "lit_cifar.data.pictures", "torchvision.transforms.v2"]


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Maker(Dataset[Tensor | ConfigError]):
    """Makes images from what `ImageSet.packed` returns and from their draws, or says why that cannot be done."""

    unpack: Callable[[Any], Tensor]
    augment: Callable[[Tensor, Tensor], Tensor] | None

    def __getitem__(self, item: tuple[Any, Any]) -> Tensor | ConfigError:
        packed, draws = item
        try:
            images = self.unpack(packed)
            images = images if self.augment is None else self.augment(images, torch.from_numpy(draws))
            images.share_memory_()  # type: ignore[no-untyped-call]  # in a queue's thread an error would be a hang
            return images
        except ConfigError as error:
            return error


def made_by_workers(
    images: ImageSet,
    parts: Sequence[Tensor],
    draws: Tensor | None,
    *,
    augment: Callable[[Tensor, Tensor], Tensor] | None,
    num_workers: int,
) -> Iterator[Tensor]:
    """The `images` at the positions in each of `parts`, in turn; they are made two parts ahead.

    `draws` (int64, (k, n)) are of all parts, and passed to `augment`.
    """
    ids = torch.cat(list(parts)).cpu()  # one copy, because the host waits for the device
    chunks = [torch.split(part, _CHUNK) for part in torch.split(ids, [len(part) for part in parts])]
    sizes = [len(chunk) for part in chunks for chunk in part]
    drawn = [None] * len(sizes) if draws is None else [each.numpy() for each in torch.split(draws.cpu(), sizes, dim=1)]
    positions = (chunk for part in chunks for chunk in part)
    set_forkserver_preload(_PRELOADED)
    made = iter(
        DataLoader(
            Maker(images.unpack, augment),
            batch_size=None,
            sampler=((images.packed(chunk), of_chunk) for chunk, of_chunk in zip(positions, drawn, strict=True)),
            num_workers=num_workers,
            multiprocessing_context="forkserver",
            prefetch_factor=max(2, -(-2 * max(map(len, chunks)) // num_workers)),
            pin_memory=images.images.device.type == "cuda",
            worker_init_fn=_begin,
            generator=torch.Generator(),  # DataLoader would otherwise draw a number from that of the training
        )
    )
    try:
        for part in chunks:
            yield torch.cat([_received(next(made), images.images.device) for _ in part])
    finally:
        del made  # this ends the workers, though the traceback of an error holds this frame


def _received(made: Tensor | ConfigError, device: torch.device) -> Tensor:
    if isinstance(made, ConfigError):
        raise made
    return made.to(device, non_blocking=True)


def _begin(worker: int) -> None:
    """Leave requests to stop to the process that trains, which may need more batches until it stops."""
    return_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_trainer, daemon=True).start()


def _end_with_trainer() -> None:
    """End when the training process is gone, or asks for it. torch's workers watch their parent, the server."""
    trainer = parent_process()
    assert trainer is not None
    while trainer.is_alive():
        asked = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        if asked is not None and asked.si_pid == trainer.pid:
            break
    os._exit(1)
