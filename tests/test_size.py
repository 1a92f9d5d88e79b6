"""The size of the package and its tests: more is more than can be kept right (see "How to add" in CONTRIBUTING.md)."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("folder", "most"), [("lit_cifar", 22_000), ("tests", 18_000)])
def test_code_does_not_outgrow_its_readers(folder: str, most: int) -> None:
    num_lines = sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert num_lines <= most, f"{folder} has {num_lines} lines: a feature comes with what goes for it"
