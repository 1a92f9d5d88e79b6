"""One ResNet34 trainer for CIFAR-10, and every way to parallelise it with PyTorch and Lightning."""

from lit_cifar.launch import startup as _startup  # isort: skip  # before everything that takes time

with _startup.collector_paused():
    from lit_cifar import strategies as _strategies  # registers the names that --trainer.strategy knows
    from lit_cifar.data import CIFAR10DataModule
    from lit_cifar.errors import CheckpointError, ConfigError, DataError
    from lit_cifar.task.module import LitResNet
    from lit_cifar.task.muon import MuonSGD
    from lit_cifar.task.optim import NesterovSGD, WarmupDecay

__version__ = "0.1.0"  # of the distribution too: pyproject.toml reads it here
__all__ = [
    "CIFAR10DataModule",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LitResNet",
    "MuonSGD",
    "NesterovSGD",
    "WarmupDecay",
]

del _startup, _strategies
