"""Functions of other libraries replaced in a process that ends with its run."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[ModuleType], object]]] = {}  # what to call with modules that are not imported yet


def patched(owner: Any, name: str, other: Callable[..., Any]) -> None:
    """Call `other` in place of `owner.name`, which it gets before the arguments. Lightning reads the old signature.

    An owner in words is a module, or such as "click.core:Command" a class in it, which the script may import later.
    """
    if isinstance(owner, str):
        module, _, kind = owner.partition(":")
        _when_imported(module, lambda found: patched(getattr(found, kind) if kind else found, name, other))
        return
    own = getattr(owner, name)

    @wraps(own)
    def called(*args: Any, **settings: Any) -> Any:
        return other(own, *args, **settings)

    setattr(owner, name, called)


def before(note: Callable[..., object]) -> Callable[..., Any]:
    """For any function: call `note` with its arguments, then the function itself."""

    def noted(own: Any, *args: Any, **settings: Any) -> Any:
        note(*args, **settings)
        return own(*args, **settings)

    return noted


def after(note: Callable[[Any], object]) -> Callable[..., Any]:
    """For a method of a class, such as its constructor: call `note` with the object when it is done."""

    def done(own: Any, instance: Any, *args: Any, **settings: Any) -> Any:
        result = own(instance, *args, **settings)
        note(instance)
        return result

    return done


class _AfterImport(MetaPathFinder):
    """Finds a module as it is found without it, and lets what waits for the module be called with it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        calls = _waiting.pop(fullname, [])
        spec = find_spec(fullname) if calls else None
        if spec is None or spec.loader is None:
            return None

        def execute(own: Any, module: ModuleType) -> None:
            own(module)
            for call in calls:
                with suppress(AttributeError):  # of a module of the script's own that has the same name
                    call(module)

        patched(spec.loader, "exec_module", execute)
        return spec


def _when_imported(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call a function with this module as soon as the script has imported it, or now."""
    if name in sys.modules:
        call(sys.modules[name])
        return
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    _waiting.setdefault(name, []).append(call)
