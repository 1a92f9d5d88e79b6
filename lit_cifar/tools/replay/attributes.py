"""What a module holds beside its tensors, written down for a copy of it, in this process or in another one."""

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
Key = tuple[str, str]  # a submodule's name and that of its attribute


@dataclass(frozen=True)
class Attributes:
    """Numbers, dictionaries, objects, plain tensors and the like, and which parameters are trained, at one moment.

    Where they refer to the module's own parts, as to its parameters, they will refer to those of the copy.
    """

    pickled: bytes  # a dictionary by `Key`
    unknown: list[str]  # what cannot be pickled, or is very large
    trained: set[str]  # parameters

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
        """Give them to a copy, `but` those that it has another one of; `KeyError` if it lacks a part."""
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
            is_method = callable(value) and name in dir(type(part))  # one that is replaced, as for a moment
            if is_plain(value) or not (is_torchs or is_method):
                yield (path, name), value


def is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


@cache
def _names_of_torch() -> set[str]:
    """What every module holds, and every LightningModule."""
    return {*vars(LightningModule())}


def _pickled(value: Any, own: dict[int, str]) -> bytes | None:
    """None if it cannot be."""
    file = _File()
    try:
        _Saver(file, own).dump(value)
    except Exception:  # of a stranger's class
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
        elif isinstance(value, ReferenceType) and id(part := value()) in self._own:  # as a recurrent layer's to weights
            return ReferenceType, (part,)
        return NotImplemented


def _moved(value: Tensor, kind: str) -> Tensor:
    """To this process's own device."""
    return value.to(kind)


class _Loader(Unpickler):
    """What the ranks of this very run have written."""

    def __init__(self, pickled: bytes, parts: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._parts = parts

    def persistent_load(self, name: Any) -> Any:
        return self._parts[name]
