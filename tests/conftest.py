"""What holds for every test: it leaves no process, no process group and no environment variable behind."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

# Left by Lightning: the seed for worker processes, their threads, and the place at which they met; by us: the interface
# on which they listen. They are put back.
EXPECTED = {
    "GLOO_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTEST_CURRENT_TEST",
}


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background lets them ignore Ctrl-C, and so all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
    before, variables, rank = children(), dict(os.environ), getattr(rank_zero_only, "rank", 0)
    yield
    left_rank, rank_zero_only.rank = getattr(rank_zero_only, "rank", 0), rank
    changed = {name for name in os.environ.keys() | variables if os.environ.get(name) != variables.get(name)}
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        os.environ.pop(name, None)
        if name in variables:
            os.environ[name] = variables[name]
    assert changed <= EXPECTED, f"environment variables left behind: {changed - EXPECTED}"
    assert not dist.is_initialized(), "a process group is left behind"
    assert children() <= before, "processes are left running"
    assert left_rank == rank, f"later tests would take this process for rank {left_rank}"
