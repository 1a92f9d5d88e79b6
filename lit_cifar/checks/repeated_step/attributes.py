"""A module's attributes beside its tensors, written down for a copy of it, in this or another process."""

import io
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pickle import HIGHEST_PROTOCOL, Pickler, Unpickler
from typing import Any
from weakref import ReferenceType

from lightning.pytorch import LightningModule
from torch import Tensor, nn

_LARGEST = 2**26  # bytes: a data set, or a network that the module does not own
Key = tuple[str, str]  # names of a submodule and of its attribute


@dataclass(frozen=True)
class Attributes:
    """Numbers, dictionaries, objects, plain tensors and the like, and the names of trained parameters, at one moment.

    References to the module's own parts, such as its parameters, will refer to the parts of the copy.
    """

    pickled: bytes  # a dictionary by `Key`
    unknown: list[str]  # names of attributes that cannot be pickled, or are very large
    trained: set[str]  # names of trained parameters

    @classmethod
    def of(cls, module: nn.Module) -> "Attributes":
        values, own = dict(attributes_of(module)), {id(part): name for name, part in _parts(module).items()}
        trained = {name for name, part in module.named_parameters() if part.requires_grad}
        if (pickled := _pickled(values, own)) is not None:
            return cls(pickled, [], trained)
        known = {key: value for key, value in values.items() if _pickled(value, own) is not None}
        unknown = [".".join(filter(None, key)) for key in values if key not in known]
        return cls(_pickled(known, own) or b"", unknown, trained)

    def fill(self, module: nn.Module, *, but: Collection[Key] = ()) -> None:
        """Give all `but` these to a copy. Raise a `KeyError` if it lacks a part."""
        parts = _parts(module)
        for (path, name), value in _Loader(self.pickled, parts).load().items():
            if (path, name) not in but:
                vars(parts[f"module {path}"])[name] = value
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in self.trained)


def _parts(module: nn.Module) -> dict[str, Any]:
    parts: dict[str, Any] = {f"module {path}": part for path, part in module.named_modules()}
    parts |= {f"tensor {name}": part for name, part in (*module.named_parameters(), *module.named_buffers())}
    trainer = vars(module).get("_trainer")
    return parts if trainer is None else parts | {"trainer": trainer}


def attributes_of(module: nn.Module) -> Iterator[tuple[Key, Any]]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            is_torchs = name in _names_of_torch() or name.startswith("__composable")
            is_method = callable(value) and name in dir(type(part))  # a replaced method, perhaps for a moment
            if is_plain(value) or not (is_torchs or is_method):
                yield (path, name), value


def is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


@cache
def _names_of_torch() -> set[str]:
    return {*vars(LightningModule())}


def _pickled(value: Any, own: dict[int, str]) -> bytes | None:
    """The pickle of a value; None if it cannot be pickled."""
    file = _File()
    try:
        _Saver(file, own).dump(value)
    except Exception:  # a stranger's class may raise anything
        return None
    return file.getvalue()


class _File(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _LARGEST:
            raise EOFError
        return super().write(data)


class _Saver(Pickler):
    def __init__(self, file: _File, own: dict[int, str]) -> None:
        super().__init__(file, HIGHEST_PROTOCOL)
        self._own = own

    def persistent_id(self, value: Any) -> str | None:
        return self._own.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.untyped_storage().nbytes() > _LARGEST:
                raise EOFError
            if value.device.type != "cpu":
                return _moved, (value.detach().cpu(), value.device.type)
        elif isinstance(value, ReferenceType) and id(part := value()) in self._own:  # a recurrent layer's to weights
            return ReferenceType, (part,)
        return NotImplemented


def _moved(value: Tensor, kind: str) -> Tensor:
    """Move a tensor to this process's own device."""
    return value.to(kind)


class _Loader(Unpickler):
    """Loads pickles that the ranks of this very run have written."""

    def __init__(self, pickled: bytes, parts: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._parts = parts

    def persistent_load(self, name: Any) -> Any:
        return self._parts[name]
