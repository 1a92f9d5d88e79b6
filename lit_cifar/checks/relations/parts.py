"""The parts of a training that a process holds, found as they are made or called, and their state by name."""

import gc
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from lit_cifar.checks.relations.patching import after, before, patched
from lit_cifar.checks.tensors import dense, whole

BESIDE = "kept/beside "  # begins the names of averages and modules that are called without gradients
UNSAVED = "kept/unsaved buffer "  # begins the names of buffers that no state dict has
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module)(?=\.)")
_DEEPEST, _LONGEST = 3, 300  # of the objects that a script keeps
_FOREIGN = ("torch", "lightning", "torchmetrics", "numpy", "builtins", "functools", "collections", "pathlib", "logging")


class TrainedParts:
    """Trained modules, optimizers and schedules, and what the script has beside them.

    A run that goes on from a checkpoint has its path, and the parameters, by the order of their making, to spoil before
    it is loaded: the same seed would otherwise hide that the checkpoint does not hold them.
    """

    def __init__(self, checkpoint: str | None, to_spoil: Iterable[int]) -> None:
        self.roots: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedules: list[LRScheduler] = []
        self.kept: dict[str, Any] = {}
        self._beside = weakref.WeakKeyDictionary[nn.Module, None]()  # such as averages, as long as the script has them
        self.late = set[nn.Module]()  # those since the last step, also where the main() that had them is over
        self._made: list[weakref.ref[nn.Parameter]] = []  # in the order of their making
        self._checkpoint, self.to_spoil = checkpoint, {*to_spoil}

    def patch(self) -> None:
        for made in ("__init__", "__setstate__"):  # of one that is read as a whole
            patched(Optimizer, made, after(self._keep_optimizer))
        for kind in (LRScheduler, ReduceLROnPlateau):  # which does not call the constructor of the other
            patched(kind, "__init__", after(self.schedules.append))
        patched(GradScaler, "__init__", after(self._keep_scaler))
        patched(AveragedModel, "update_parameters", after(self.keep_beside))
        register_module_parameter_registration_hook(lambda module, name, own: self._made.append(weakref.ref(own)))
        patched(nn.Module, "load_state_dict", before(lambda module, *_, **__: self._spoil(module.parameters())))
        patched(torch, "load", before(self._spoil_by_file))

    @property
    def made(self) -> list[nn.Parameter | None]:
        """All parameters that were made, None for those that the script has given up."""
        return [own() for own in self._made]

    def is_root(self, module: nn.Module) -> bool:
        return any(module is root for root in self.roots)

    def forget_given_up(self) -> None:
        """Forget models, optimizers and schedules that the script has given up, as one that begins again has."""
        all_held: list[list[Any]] = [self.roots, self.optimizers, self.schedules]
        alive = [weakref.WeakValueDictionary(enumerate(held)) for held in all_held]
        modules = weakref.WeakValueDictionary({name: it for name, it in self.kept.items() if isinstance(it, nn.Module)})
        self.kept = {name: value for name, value in self.kept.items() if name not in modules}
        for held in all_held:
            held.clear()
        gc.collect()
        for held, own in zip(all_held, alive, strict=True):
            held += own.values()
        self.kept |= modules

    def keep_beside(self, module: nn.Module) -> None:
        self._beside[module] = None
        self.late.add(module)

    def _keep_optimizer(self, optimizer: Optimizer) -> None:
        if all(optimizer is not own for own in self.optimizers):
            self.optimizers.append(optimizer)

    def _keep_scaler(self, scaler: GradScaler) -> None:
        self.kept[f"scaler {sum(name.startswith('scaler ') for name in self.kept)}"] = scaler

    def _spoil_by_file(self, f: Any, *_: Any, **__: Any) -> None:
        if self._checkpoint and str(f).startswith(self._checkpoint):
            self.spoil_all()

    def spoil_all(self) -> None:
        self._spoil(self.made)

    def _spoil(self, parameters: Iterable[nn.Parameter | None]) -> None:
        ids = {*map(id, parameters)} if self.to_spoil else set()
        for place, parameter in enumerate(self.made if ids else ()):
            if parameter is not None and place in self.to_spoil and id(parameter) in ids:
                self.to_spoil.remove(place)
                with torch.no_grad():
                    parameter.mul_(1.5).add_(0.01)

    def snapshot(self) -> dict[str, Any]:
        """Copies of all tensors and numbers by name. All ranks must call this, as they may divide a tensor."""
        places = {id(one): place for place, one in enumerate(self.made)}

        def first(root: nn.Module) -> int:
            return min((places.get(id(one), len(places)) for one in root.parameters()), default=len(places))

        roots = sorted(self.roots, key=first)
        found: dict[str, Any] = {}
        names: dict[int, str] = {}  # of trained parameters
        for prefix, root in _numbered(outermost(roots)):
            for name, parameter in root.named_parameters():
                names[id(parameter)] = prefix + _plain(name)
                _add(found, f"weights/{prefix}{_plain(name)}", parameter)
            unsaved = {id(own._buffers[name]) for own in root.modules() for name in own._non_persistent_buffers_set}
            for name, buffer in root.named_buffers():
                _add(found, f"{UNSAVED if id(buffer) in unsaved else 'buffers/'}{prefix}{_plain(name)}", buffer)
        for prefix, optimizer in _numbered(self.optimizers):
            _add_optimizer(found, optimizer, prefix, names)
        for number, schedule in enumerate(self.schedules):
            _add(found, f"schedule/{number}", schedule.state_dict())
        for name, value in self.kept.items():
            _add(found, f"kept/{name}", value)
        alive = [one for one in self._beside if names.keys().isdisjoint(map(id, one.parameters()))]
        for number, module in enumerate(alive):
            _add(found, f"{BESIDE}{number}", module)
        return found


def outermost(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that are no part of another."""
    parts = {id(part) for root in roots for part in [*root.modules()][1:]}
    return [root for root in roots if id(root) not in parts]


def _numbered(parts: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each with what its names begin with, which is nothing for the first."""
    return ((f"{number}." if number else "", part) for number, part in enumerate(parts))


def _plain(name: str) -> str:
    """A name as it is without wrappers."""
    return _WRAPPERS.sub("", name).lstrip(".")


def _add_optimizer(found: dict[str, Any], optimizer: Optimizer, prefix: str, names: Mapping[int, str]) -> None:
    for group_number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = prefix + names.get(id(parameter), f"group {group_number}.{place}")
            if not isinstance(parameter, nn.Parameter):  # a tensor of the script's own, which is in no module
                _add(found, f"weights/{name}", parameter)
            for what, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor | Real):
                    _add(found, f"optimizer/{name}.{what}", value)
            numbers = {what: value for what, value in group.items() if type(value) in (int, float)}
            _add(found, f"settings/{name}", numbers)


def _add(found: dict[str, Any], name: str, value: Any, depth: int = 0) -> None:
    """Add copies of the tensors and numbers inside an object, a few levels deep."""
    if isinstance(value, Tensor):
        if value.layout is torch.sparse_coo:  # as a whole it may not fit into the memory
            sparse = value.detach().coalesce()
            _add(found, name, {"indices": sparse.indices(), "values": sparse.values()})
        elif not value.is_meta:  # such as weights that another process trains
            found[name] = dense(whole(value.detach())).cpu().clone()
    elif isinstance(value, Real):
        found[name] = float(value)
    elif isinstance(value, nn.Module):
        for own, tensor in (*value.named_parameters(), *value.named_buffers()):
            _add(found, f"{name}.{_plain(own)}", tensor)
    elif depth <= _DEEPEST:
        for own, part in _inside(value):
            _add(found, f"{name}.{own}", part, depth + 1)


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value) if len(value) < _LONGEST else ()
    if isinstance(value, GradScaler):
        return _inside(value.state_dict())
    is_foreign = type(value).__module__.split(".")[0] in _FOREIGN or not hasattr(value, "__dict__")
    return () if is_foreign else ((name, part) for name, part in vars(value).items() if not name.startswith("__"))
