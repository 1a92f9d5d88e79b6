"""One ResNet34 trainer for CIFAR-10, and every way to parallelise it with PyTorch and Lightning.

`import lit_cifar.strategies` registers the names that `Trainer(strategy=...)` knows beside Lightning's own.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from lit_cifar.launch import startup as startup  # notes the parent before the imports that take seconds
from lit_cifar.version import __version__ as __version__

if TYPE_CHECKING:
    from lit_cifar.checks import relations as relations
    from lit_cifar.checks.replica_audit.callback import ReplicaAudit as ReplicaAudit
    from lit_cifar.checks.watchdog.callback import Watchdog as Watchdog
    from lit_cifar.data import CIFAR10DataModule as CIFAR10DataModule
    from lit_cifar.errors import CheckpointError as CheckpointError
    from lit_cifar.errors import ConfigError as ConfigError
    from lit_cifar.errors import DataError as DataError
    from lit_cifar.task.module import LitResNet as LitResNet
    from lit_cifar.task.muon import MuonSGD as MuonSGD
    from lit_cifar.task.optim import NesterovSGD as NesterovSGD
    from lit_cifar.task.optim import WarmupDecay as WarmupDecay

_PLACES = {
    "CIFAR10DataModule": "lit_cifar.data",
    "LitResNet": "lit_cifar.task.module",
    "MuonSGD": "lit_cifar.task.muon",
    "ReplicaAudit": "lit_cifar.checks.replica_audit.callback",
    "Watchdog": "lit_cifar.checks.watchdog.callback",
    "relations": "lit_cifar.checks",
    **dict.fromkeys(("CheckpointError", "ConfigError", "DataError"), "lit_cifar.errors"),
    **dict.fromkeys(("NesterovSGD", "WarmupDecay"), "lit_cifar.task.optim"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = resolve_name(f"{_PLACES[name]}.{name}")
    return globals()[name]
