"""Data sets as uint8 images, in memory or a mapped file, and their batches. Nothing here knows models or strategies."""

from lit_cifar.data.datamodule import CIFAR10DataModule
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.options import Augment, Pictures

__all__ = ["Augment", "Batch", "CIFAR10DataModule", "ImageSet", "Pictures"]
