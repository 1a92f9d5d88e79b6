"""A part of many tests, for a machine that has no time for all: `pytest -m exhaustive --part=K/N`."""

from collections.abc import Collection

import pytest


def in_part(names: Collection[str], part: str) -> set[str]:
    """Those of part `K/N`, K from 1: every Nth in the order of their names, as those beside each other take as long.

    Raises:
        pytest.UsageError: It is not such a part.
    """
    index, _, count = part.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise pytest.UsageError(f"--part={part}: expected K/N with K from 1 to N, as 1/11")
    return set(sorted(names)[int(index) - 1 :: int(count)])
