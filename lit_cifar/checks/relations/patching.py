"""Functions of other libraries replaced in a process that ends with its run."""

from collections.abc import Callable
from functools import wraps
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
