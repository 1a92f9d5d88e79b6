"""Python's garbage collector while the imports are made, which leave a million objects and no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let the collector wait: looking through the imported objects again and again takes a fifth of the imports.

    Afterwards they are in its oldest generation. As young ones it would look through them twice within a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # what somebody has frozen stays so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if was_enabled:
            gc.enable()
