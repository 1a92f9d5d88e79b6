"""What holds for every test: it leaves no process, no process group and no environment variable behind."""

import os
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

# Lightning's seed_everything sets them for worker processes, which our loaders do not have.
EXPECTED = {"PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTEST_CURRENT_TEST"}


def children() -> set[int]:
    """Running processes below this one; multiprocessing keeps its resource tracker for good."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            running = process.status() != psutil.STATUS_ZOMBIE
            if running and "resource_tracker" not in " ".join(process.cmdline()):
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the test that leaks, not the one that suffers from it."""
    before, variables = children(), dict(os.environ)
    yield
    leaked = {name for name, value in os.environ.items() if variables.get(name) != value} - EXPECTED
    for name in leaked:
        os.environ.pop(name)
        if name in variables:
            os.environ[name] = variables[name]
    assert not leaked, f"environment variables left behind: {leaked}"
    assert not dist.is_initialized(), "a process group is left behind"
    assert children() <= before, "processes are left running"
