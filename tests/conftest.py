"""What holds for every test: it leaves no process, no process group and no environment variable behind."""

import os
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

# Left by Lightning: the seed for worker processes, their threads, and the port at which they met. They are put back.
EXPECTED = {"PL_GLOBAL_SEED", "PL_SEED_WORKERS", "MASTER_PORT", "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST"}


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
    changed = {name for name in os.environ.keys() | variables if os.environ.get(name) != variables.get(name)}
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        os.environ.pop(name, None)
        if name in variables:
            os.environ[name] = variables[name]
    assert changed <= EXPECTED, f"environment variables left behind: {changed - EXPECTED}"
    assert not dist.is_initialized(), "a process group is left behind"
    assert children() <= before, "processes are left running"
