"""Python's garbage collector while the imports are made, which leave a million objects and no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let the collector wait: looking through the imported objects again and again takes a fifth of the imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
