"""Keeps the memory that a training step on a CPU frees, so that the next step need not ask the system for it again.

glibc returns a large block to the system when it is freed. The next step gets it back page by page, each filled with
zeros: for a ResNet34 some thousand page faults a step.
"""

import ctypes

from lightning.pytorch import Callback, LightningModule, Trainer

# Parameters of glibc's mallopt, <malloc.h>.
_TRIM_THRESHOLD = -1  # bytes that may be free at the heap's end before they are returned
_MMAP_THRESHOLD = -3  # bytes from which a block lies outside the heap
_MMAP_MAX = -4  # blocks that may lie outside the heap, where freeing a block returns it
_NEVER = 2**31 - 1


class KeepFreedMemory(Callback):
    """Lets every process of a run on CPUs keep what it frees: see mallopt(3), M_TRIM_THRESHOLD and M_MMAP_MAX."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.strategy.root_device.type == "cpu":
            libc = ctypes.CDLL(None)
            libc.mallopt(_TRIM_THRESHOLD, _NEVER)
            libc.mallopt(_MMAP_MAX, 0)


def return_freed_memory() -> None:
    """Let this process return each large block that it frees.

    glibc would put blocks of a size that has been freed before into the heap. There torch's blocks, which are aligned,
    leave gaps that the next block does not fit into: a process that only hands its tensors on grows by each of them.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)
