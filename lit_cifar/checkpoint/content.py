"""What an entry of a checkpoint may be. A file comes from anybody: nothing of it is used, or printed, before."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from lit_cifar.errors import CheckpointError, printable

_MOST = 2**40  # no count of ours is as large


def check_content(value: Any, form: Any, place: str = "", *, partly: bool = False) -> None:
    """Raise a `CheckpointError` unless `value`, which a file holds at `place`, is as `form` says.

    That is a type, with `int` for counts, `str` for one printable line and `Annotated[str, PATTERN]` for one of a
    pattern; a class of data, for a dictionary of its fields; or an example: a dictionary of forms by name, a list of
    forms, a number or 0-dim tensor for any number, a tensor for those of its shape, None for anything.
    If it is given `partly`, the outer dictionary may lack entries: releases of torch and Lightning differ in some.
    """
    if not _fits(value, form):
        raise _misfit(place, described(value))
    for name, part in _parts(value, form).items():
        where = f"{place}.{name}" if place else str(name)
        if not isinstance(value, dict) or name in value:
            check_content(value[name], part, where, partly=partly and not isinstance(value, dict))
        elif not partly:
            raise _misfit(where, "missing")


def described(value: Any) -> str:
    """What a file holds; of a tensor of numbers that can be computed with, the shape says enough."""
    if not isinstance(value, Tensor):
        return printable(reprlib.repr(value))
    kinds = [] if value.is_floating_point() and value.itemsize > 1 else [value.dtype]
    stored = ["meta"] if value.is_meta else [value.layout] if value.layout is not torch.strided else []
    return " ".join([*(str(each).removeprefix("torch.") for each in (*kinds, *stored)), str(tuple(value.shape))])


def _misfit(place: str, found: str) -> CheckpointError:
    return CheckpointError(f"its {printable(place)} is {found}, as no run of this program writes it")


def _fits(value: Any, form: Any) -> bool:
    """Whether `value` is of a form, apart from its parts."""
    origin, arguments = get_origin(form), get_args(form)
    if form is None or form is Any:
        return True
    if is_dataclass(form):
        return isinstance(value, dict) and value.keys() <= get_type_hints(form).keys()
    if origin is dict:
        return isinstance(value, dict) and all(_fits(name, arguments[0]) for name in value)
    if isinstance(form, list | tuple) or origin in (list, tuple):
        return isinstance(value, list | tuple) and (bool(value) or not form)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is Annotated:
        return isinstance(value, str) and re.fullmatch(arguments[1], value) is not None
    if form is int:
        return type(value) is int and 0 <= value < _MOST
    if form is str:
        return isinstance(value, str) and value.isprintable()
    if isinstance(form, Tensor) and form.ndim:
        return described(value) == described(form)
    if isinstance(form, bool):
        return isinstance(value, bool | None)  # torch has flags that decide for themselves
    if form is float or isinstance(form, int | float | Tensor):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number or (isinstance(value, Tensor) and described(value) in ("()", "int64 ()", "int32 ()"))
    return isinstance(value, form if isinstance(form, type) else type(form))


def _parts(value: Any, form: Any) -> Mapping[Any, Any]:
    """The forms of the parts of `value` that a form speaks of, by name or index."""
    origin, arguments = get_origin(form), get_args(form)
    if origin in (Union, UnionType):
        return _parts(value, next(each for each in arguments if _fits(value, each)))
    if is_dataclass(form):
        return get_type_hints(form, include_extras=True)
    if isinstance(form, Mapping):  # numbers are no names, such as the steps at which a schedule does something
        return {name: part for name, part in form.items() if isinstance(name, str)}
    if isinstance(form, list | tuple):
        known = [each for each in range(len(value)) if form and not (isinstance(form, tuple) and value[each] is None)]
        return {index: form[min(index, len(form) - 1)] for index in known}
    if origin in (list, tuple):
        return dict.fromkeys(range(len(value)), arguments[0])
    return dict.fromkeys(value, arguments[1]) if origin is dict else {}
