"""What an entry of a checkpoint may be. A file comes from anybody: nothing of it is used, or printed, before."""

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from lit_cifar.errors import CheckpointError, printable

_MOST = 2**40  # no count of ours is as large
_LONGEST = 60  # characters of a value that is shown


def check_content(value: Any, form: Any, place: str = "") -> None:
    """Raise a `CheckpointError` unless `value`, which a file holds at `place`, is as `form` says.

    That is a type, with `int` for counts and `str` for one printable line; a class of data, for a dictionary of its
    fields; or an example: a dictionary of forms by name, a list of forms, a number or 0-dim tensor for any number, a
    tensor for those of its shape, None for anything.
    """
    for where, found in _misfits(value, form, place):
        raise malformed(
            f"its {printable(where.lstrip('.'))} is {described(found)}, as no run of this program writes it"
        )


def malformed(problem: str) -> CheckpointError:
    """The error that a file holds what no run can go on from, or has written."""
    return CheckpointError(problem, remedy="use another checkpoint")


def described(value: Any) -> str:
    """What a file holds; of a tensor of numbers that can be computed with, the shape says enough."""
    if not isinstance(value, Tensor):
        shown = repr(value) if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"
        if isinstance(value, dict | list | tuple):
            shown = (
                f"{shown} with {', '.join(map(str, value))}" if isinstance(value, dict) else f"{shown} of {len(value)}"
            )
        return printable(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}...")
    kinds = [] if value.is_floating_point() and value.itemsize > 1 else [value.dtype]
    stored = ["meta"] if value.is_meta else [value.layout] if value.layout is not torch.strided else []
    return " ".join([*(str(each).removeprefix("torch.") for each in (*kinds, *stored)), str(tuple(value.shape))])


def among(example: Mapping[str, Any], found: Any) -> Mapping[str, Any]:
    """The entries of an example that a file has too: releases of torch and Lightning differ in some."""
    return {name: form for name, form in example.items() if not isinstance(found, dict) or name in found}


def _misfits(value: Any, form: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The places, with what is there, at which `value` is not of the form."""
    if not _is(value, form):
        yield place, value
        return
    for name, item, part in _parts(value, form):
        yield from _misfits(item, part, f"{place}.{name}")


def _is(value: Any, form: Any) -> bool:
    """Whether `value` is of a form, apart from its parts."""
    origin, arguments = get_origin(form), get_args(form)
    if form is None or form is Any:
        return True
    if is_dataclass(form):
        return isinstance(value, dict) and value.keys() == get_type_hints(form).keys()
    if isinstance(form, Mapping):
        return isinstance(value, dict) and _named(form).keys() <= value.keys()
    if origin is dict:
        return isinstance(value, dict) and all(_is(name, arguments[0]) for name in value)
    if isinstance(form, list | tuple) or origin in (list, tuple):
        return isinstance(value, list | tuple) and (bool(value) or not form)
    if origin in (Union, UnionType):
        return any(_is(value, each) for each in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if form is int:
        return type(value) is int and 0 <= value < _MOST
    if form is str:
        return isinstance(value, str) and value.isprintable()
    if form is float:
        return _is_number(value)
    if isinstance(form, type):
        return isinstance(value, form)
    if isinstance(form, Tensor) and form.ndim:
        return described(value) == described(form)
    if isinstance(form, bool):
        return isinstance(value, bool | None)  # torch has flags that decide for themselves
    return _is_number(value) if _is_number(form) else isinstance(value, type(form))


def _named(form: Mapping[Any, Any]) -> dict[str, Any]:
    """What an example says by name: numbers are no names, such as the steps at which a schedule does something."""
    return {name: part for name, part in form.items() if isinstance(name, str)}


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, int | float) and not isinstance(value, bool)
    return is_scalar or (isinstance(value, Tensor) and described(value) in ("()", "int64 ()", "int32 ()"))


def _parts(value: Any, form: Any) -> list[tuple[Any, Any, Any]]:
    """The parts of `value` that the form speaks of: name or index, what is there, and its form."""
    form = get_type_hints(form) if is_dataclass(form) else form
    if isinstance(form, Mapping):
        return [(name, value[name], part) for name, part in _named(form).items()]
    if isinstance(form, list | tuple):
        return [(index, item, form[min(index, len(form) - 1)]) for index, item in enumerate(value) if form]
    if get_origin(form) is dict:
        return [(name, item, get_args(form)[1]) for name, item in value.items()]
    if get_origin(form) in (list, tuple):
        return [(index, item, get_args(form)[0]) for index, item in enumerate(value)]
    return []
