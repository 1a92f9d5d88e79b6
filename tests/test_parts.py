"""Which tests a process runs: what shares a fixture of its module stays together."""

import os

import pytest


@pytest.fixture(scope="module")
def shared() -> None:
    pass


@pytest.mark.usefixtures("shared")
def test_what_shares_a_fixture_runs_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist keeps tests together whose names end alike."""
    assert request.node.nodeid.endswith("@test_parts") or "PYTEST_XDIST_WORKER" not in os.environ
