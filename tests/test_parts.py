"""Who runs which tests: parts are together all and none twice; what shares a fixture of its module stays together."""

import os

import pytest
from parts import in_part

NAMES = [f"tests/test_{name}.py::test_it[{case}]" for name in "ab" for case in range(16)]


@pytest.mark.parametrize("count", [1, 2, 11, 40])
def test_parts_are_all_tests_and_none_twice(count: int) -> None:
    parts = [in_part(NAMES, f"{index}/{count}") for index in range(1, count + 1)]
    assert sorted(name for part in parts for name in part) == sorted(NAMES)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == [in_part(NAMES[::-1], f"{index}/{count}") for index in range(1, count + 1)]


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/3", "-1/3", ""])
def test_what_is_no_part_is_refused(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="expected K/N"):
        in_part(NAMES, part)


@pytest.fixture(scope="module")
def shared() -> None:
    pass


@pytest.mark.usefixtures("shared")
def test_what_shares_a_fixture_runs_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist keeps tests together whose names end alike."""
    assert request.node.nodeid.endswith("@test_parts") or "PYTEST_XDIST_WORKER" not in os.environ
