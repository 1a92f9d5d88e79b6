"""The parts of a training that a process holds, found as they are made or called."""

import gc
import weakref
from collections.abc import Container
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from lit_cifar.checks.relations.interruption import GoOn
from lit_cifar.checks.relations.patching import after, patched
from lit_cifar.checks.relations.snapshot import BESIDE, snapshot


class TrainedParts:
    """Trained modules, optimizers and schedules, and what the script has beside them."""

    def __init__(self, go_on: GoOn | None) -> None:
        self.roots: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedules: list[LRScheduler] = []
        self.kept: dict[str, Any] = {}
        self._beside: list[weakref.ref[nn.Module]] = []
        self._made: list[weakref.ref[nn.Parameter]] = []  # in the order of their making
        self._go_on, self.to_spoil = go_on, set(go_on.redrawn if go_on else ())

    def patch(self) -> None:
        patched(Optimizer, "__init__", after(self.optimizers.append))
        patched(LRScheduler, "__init__", after(self.schedules.append))
        patched(GradScaler, "__init__", after(self.keep_scaler))
        patched(AveragedModel, "update_parameters", after(self.keep_beside))
        register_module_parameter_registration_hook(lambda module, name, own: self._made.append(weakref.ref(own)))
        patched(nn.Module, "load_state_dict", self._load_state)
        patched(torch, "load", self._load_file)

    @property
    def made(self) -> list[nn.Parameter | None]:
        """All parameters that were made, None for those that the script has given up."""
        return [own() for own in self._made]

    def is_root(self, module: nn.Module) -> bool:
        return any(module is root for root in self.roots)

    def add_root(self, module: nn.Module) -> None:
        """Add a trained module. One that begins again in the same process has given up its first model: forget that."""
        all_held: list[list[Any]] = [self.roots, self.optimizers, self.schedules]
        seen = [[weakref.ref(one) for one in held] for held in all_held]
        modules = {name: weakref.ref(value) for name, value in self.kept.items() if isinstance(value, nn.Module)}
        for held in all_held:
            held.clear()
        for name in modules:
            del self.kept[name]
        gc.collect()
        for held, before in zip(all_held, seen, strict=True):
            held += [one for own in before if (one := own()) is not None]
        self.kept |= {name: one for name, own in modules.items() if (one := own()) is not None}
        self.roots.append(module)

    def keep_beside(self, module: nn.Module) -> None:
        """Keep a module, such as an average, as long as the script does."""
        if not any(module is other() for other in self._beside):
            self._beside.append(weakref.ref(module))

    def keep_scaler(self, scaler: GradScaler) -> None:
        self.kept[f"scaler {sum(name.startswith('scaler ') for name in self.kept)}"] = scaler

    def snapshot(self) -> dict[str, Any]:
        places = {id(one): place for place, one in enumerate(self.made)}
        roots = sorted(self.roots, key=lambda root: min(places.get(id(p), len(places)) for p in root.parameters()))
        trained = {id(parameter) for root in self.roots for parameter in root.parameters()}
        alive = [one for own in self._beside if (one := own()) is not None]
        alive = [one for one in alive if trained.isdisjoint(map(id, one.parameters()))]
        beside = {f"{BESIDE.partition('/')[2]}{number}": one for number, one in enumerate(alive)}
        return snapshot(roots, self.optimizers, self.schedules, self.kept | beside)

    # Parameters that are drawn are changed before a checkpoint is loaded: the same seed would otherwise hide that the
    # checkpoint does not hold them.
    def _load_state(self, load: Any, module: nn.Module, *args: Any, **settings: Any) -> Any:
        self._spoil({id(parameter) for parameter in module.parameters()})
        return load(module, *args, **settings)

    def _load_file(self, load: Any, f: Any, *args: Any, **settings: Any) -> Any:
        if self._go_on and str(f).startswith(self._go_on.checkpoint):
            self.spoil_all()
        return load(f, *args, **settings)

    def spoil_all(self) -> None:
        self._spoil(set(map(id, self.made)))

    def _spoil(self, ids: Container[int]) -> None:
        for place, parameter in enumerate(self.made if self.to_spoil else ()):
            if parameter is not None and place in self.to_spoil and id(parameter) in ids:
                self.to_spoil.remove(place)
                with torch.no_grad():
                    parameter.mul_(1.5).add_(0.01)
