"""Imports leave a million objects, which Python's garbage collector should not look through."""

import gc
import subprocess
import sys

import pytest

from lit_cifar.launch.startup import gc_paused

_COUNT = """
import gc, lit_cifar
print(sum(len(gc.get_objects(generation)) for generation in (0, 1)), gc.isenabled(), gc.get_freeze_count())
"""


def test_an_error_starts_the_collector_again() -> None:
    with pytest.raises(ImportError), gc_paused():
        raise ImportError
    assert gc.isenabled()


def test_what_is_switched_off_or_frozen_stays_so() -> None:
    gc.disable()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with gc_paused():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
        gc.enable()


def test_the_package_leaves_few_young_objects() -> None:
    printed = subprocess.run([sys.executable, "-c", _COUNT], check=True, capture_output=True, text=True).stdout.split()
    assert int(printed[0]) < 10_000
    assert printed[1:] == ["True", "0"]
