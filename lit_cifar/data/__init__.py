"""Data sets as uint8 images, in memory or decoded when needed, and batches. Nothing here knows models."""

from lit_cifar.data.augment import Augment
from lit_cifar.data.balance import Balance
from lit_cifar.data.datamodule import CIFAR10DataModule
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.mixing import Mixing
from lit_cifar.data.sample_order import Order

__all__ = ["Augment", "Balance", "Batch", "CIFAR10DataModule", "ImageSet", "Mixing", "Order"]
