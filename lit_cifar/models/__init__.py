"""Single-device networks. They know nothing of data sets or of parallelism."""

from lit_cifar.models.resnet import Arch, Stem, build_resnet

__all__ = ["Arch", "Stem", "build_resnet"]
