"""Functions of other libraries replaced in a process that ends with its run."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def patched(owner: Any, name: str, made: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace `owner.name` by `made(owner.name)`, with the same signature, which Lightning reads."""
    own = getattr(owner, name)
    setattr(owner, name, wraps(own)(made(own)))


def after(note: Callable[[Any], object]) -> Callable[[Any], Callable[..., Any]]:
    """For a method of a class, such as its constructor: call `note` with the object when it is done."""

    def patch(own: Any) -> Callable[..., Any]:
        def done(instance: Any, *args: Any, **settings: Any) -> Any:
            result = own(instance, *args, **settings)
            note(instance)
            return result

        return done

    return patch
