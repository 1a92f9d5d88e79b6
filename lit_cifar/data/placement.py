"""Where the images of a split lie in memory, and which processes make batches of them."""

from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.data.images import ImageSet
from lit_cifar.errors import ConfigError, bounded

Resident = Literal["auto", "host", "device"]


class Placement:
    """What a user asks about the memory and the processes: `resident` and `num_workers` of the data module.

    `transforms` is whether training images pass through torchvision's, `are_pictures` whether the data are pictures in
    files.
    """

    def __init__(self, resident: Resident, num_workers: int | None, *, transforms: bool, are_pictures: bool) -> None:
        self._resident, self._transforms = resident, transforms
        self._num_workers = bounded("--data.num_workers", num_workers, 0, 2**16)
        if transforms and resident == "device":
            problem = "--data.resident=device makes batches on the GPU, and --data.augment.transforms run on the host"
            raise ConfigError(problem, remedy="leave one of the two out")
        if num_workers is not None and not transforms and not are_pictures:
            problem = f"--data.num_workers={num_workers} has nothing to do: these images are in memory"
            raise ConfigError(problem, remedy="leave it out, or add --data.augment.transforms")

    def place(self, images: ImageSet, *, split: str, device: torch.device | None) -> ImageSet:
        """The `images` on the host, or on the `device` of the run; without a run they stay where they are."""
        device = images.images.device if device is None else device
        if self._resident == "device" and device.type == "cpu":
            rank_zero_warn("--data.resident=device has no effect on the CPU: the host's memory is the device's")
        on_host = self._resident == "host" or (split == "train" and self._transforms and not images.are_encoded)
        if on_host or (self._resident == "auto" and device.type != "cuda"):
            return images
        has_room = self._resident == "device" or torch.cuda.mem_get_info(device)[0] > 4 * images.images.nbytes
        return images.to(device) if has_room else images

    def workers(self, images: ImageSet, *, split: str, num_processes: int) -> int | None:
        """Number of processes that make the batches, 0 if it is this one, None if blocks of batches are made here."""
        if images.are_encoded and self._num_workers is None:
            from lit_cifar.data.workers import num_cores

            return max(1, num_cores() // num_processes)
        transforms = split == "train" and self._transforms
        return self._num_workers if images.are_encoded or (transforms and self._num_workers) else None
