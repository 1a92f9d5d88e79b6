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


def patched(owner: Any, name: str, other: Callable[..., Any]) -> None:
    """Call `other` in place of `owner.name`, which it gets before the arguments. Lightning reads the old signature."""
    own = getattr(owner, name)

    @wraps(own)
    def called(*args: Any, **settings: Any) -> Any:
        return other(own, *args, **settings)

    setattr(owner, name, called)


def after(note: Callable[[Any], object]) -> Callable[..., Any]:
    """For a method of a class, such as its constructor: call `note` with the object when it is done."""

    def done(own: Any, instance: Any, *args: Any, **settings: Any) -> Any:
        result = own(instance, *args, **settings)
        note(instance)
        return result

    return done


class _AfterImport(MetaPathFinder):
    """Calls functions with modules as soon as they are imported."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], object]]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        calls = self.waiting.pop(fullname, [])
        spec = find_spec(fullname) if calls else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for call in calls:
                with suppress(AttributeError):  # of a module of the script's own that has the same name
                    call(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_after_import = _AfterImport()


def when_imported(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call a function with this module as soon as the script has imported it, or now."""
    if name in sys.modules:
        call(sys.modules[name])
        return
    _after_import.waiting.setdefault(name, []).append(call)
    if _after_import not in sys.meta_path:
        sys.meta_path.insert(0, _after_import)
