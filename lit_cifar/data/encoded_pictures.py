"""Pictures that stay encoded: worker processes decode the next batches, in each epoch anew.

Each process that trains has workers of its own, for one epoch or evaluation. They are forked from a server that has the
imports and nothing else: no threads, no connections of the process group, nothing of CUDA.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import parent_process, set_forkserver_preload

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_cifar.data.images import ImageSet
from lit_cifar.errors import DataError, printable
from lit_cifar.launch.malloc_tuning import return_freed_memory

_CHUNK = 32  # pictures that a worker decodes at a time


@dataclass(frozen=True)
class EncodedImages(ImageSet):
    """Images that are decoded whenever they are gathered. `images` is empty, and tells their size and device."""

    paths: Sequence[str]
    rows: Tensor  # int64, (N,): positions in `paths`
    read: Callable[[str], Tensor | str]  # decodes one to uint8, (3, height, width), or says why that cannot be done
    num_workers: int | None  # 0 for this process itself, None for its share of the cores
    num_processes: int = 1  # number of processes that train on this machine

    def subset(self, ids: Tensor) -> "EncodedImages":
        return replace(self, rows=self.rows[ids], labels=self.labels[ids])

    def gather(self, ids: Tensor) -> Tensor:
        """The pixels at positions `ids`, decoded in this process."""
        return self._received(_Decoder(self.read, self.images.shape[2:])[self._paths(self.rows[ids.cpu()])])

    def gather_each(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """`gather` of each, in turn, decoded by workers; they are two parts ahead."""
        rows = self.rows[torch.cat(list(parts)).cpu()]  # one copy, because the host waits for the device
        chunks = [torch.split(part, _CHUNK) for part in torch.split(rows, [len(part) for part in parts])]
        share = max(1, len(os.sched_getaffinity(0)) // self.num_processes)
        workers = share if self.num_workers is None else self.num_workers
        if workers:
            set_forkserver_preload(["lit_cifar.launch.fork_server", "lit_cifar.data.pictures"])
        decoded = iter(
            DataLoader(
                _Decoder(self.read, self.images.shape[2:]),
                batch_size=None,
                sampler=(self._paths(chunk) for part in chunks for chunk in part),
                num_workers=workers,
                multiprocessing_context="forkserver" if workers else None,
                prefetch_factor=max(2, -(-2 * max(map(len, chunks)) // workers)) if workers else None,
                pin_memory=self.images.device.type == "cuda",
                worker_init_fn=_begin,
                generator=torch.Generator(),  # DataLoader would otherwise draw a number from that of the training
            )
        )
        try:
            for part in chunks:
                yield torch.cat([self._received(next(decoded)) for _ in part])
        finally:
            del decoded  # this ends the workers, though the traceback of an error holds this frame

    def _paths(self, rows: Tensor) -> list[str]:
        return [self.paths[row] for row in rows.tolist()]

    def _received(self, decoded: Tensor | str) -> Tensor:
        if isinstance(decoded, str):
            raise DataError(
                f"a picture cannot be read: {decoded}",
                remedy="replace it and go on with --resume=auto, or move it away and start again",
            )
        return decoded.to(self.images.device, non_blocking=True)


@dataclass(frozen=True)
class _Decoder(Dataset[Tensor | str]):
    """Turns the paths of some pictures into their pixels, or into a line on the first that cannot be read."""

    read: Callable[[str], Tensor | str]
    size: Sequence[int]  # height and width

    def __getitem__(self, paths: list[str]) -> Tensor | str:
        images = torch.empty((len(paths), 3, *self.size), dtype=torch.uint8)
        for path, image in zip(paths, images, strict=True):
            found = self.read(path)
            if isinstance(found, str):
                return f"{printable(path)}: {found}"
            image.copy_(found)
        return images


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
