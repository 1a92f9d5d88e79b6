"""The loop of the articles, as it stands in many tutorials: what everything here is compared with.

Plain PyTorch: torchvision's ResNet34, PIL transforms in a DataLoader, float32, SGD, and `loss.item()` in every step.
Source of the loop: Anthony Peng's articles on training with several GPUs, part 1.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from lit_cifar.data.images import ImageSet


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


def loader(images: ImageSet, *, batch_size: int, mean: Any, std: Any) -> DataLoader[Any]:
    """Shuffled, cropped, flipped and normalised batches, made in this process."""
    size = images.images.shape[-1]
    steps = [transforms.RandomCrop(size, padding=4), transforms.RandomHorizontalFlip()]
    steps += [transforms.ToTensor(), transforms.Normalize(mean, std)]
    dataset = PILImages(images, transforms.Compose(steps))
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)


def forever(batches: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def training_step(
    network: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], device: torch.device
) -> Callable[[], float]:
    """A function that trains on the next batch and returns the loss."""
    network.to(device).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    def step() -> float:
        images, labels = next(batches)
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(network(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.item())

    return step
