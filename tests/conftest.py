"""What holds for every test: it leaves no process, no process group and nothing that is set for this one behind."""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from commands import TINY, run_here
from lightning.pytorch.utilities import rank_zero_only
from processes import adopt_orphans, children

import lit_cifar.strategies  # noqa: F401  # registers their names

# Left by Lightning: the seed for worker processes, their threads, and the place at which they met; by us: the interface
# on which they listen; and on a GPU the order of its devices. They are put back.
EXPECTED = {"CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "NCCL_SOCKET_IFNAME"}
EXPECTED |= {"OMP_NUM_THREADS", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTEST_CURRENT_TEST"}
_FAREWELL_S = 5.0  # for a process that has been told to end

# A shell that runs the tests in the background lets them ignore Ctrl-C, nohup SIGHUP, and so all that they start.
for number, handler in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


adopt_orphans()
# `torch.multiprocessing.start_processes` may fork its processes too.
multiprocessing.set_forkserver_preload(["lit_cifar.cli.main", "lit_cifar.strategies"])
# Several processes run the tests, and those of a run share the cores as well: more threads only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# `caplog` hears the root logger, and Lightning tells it nothing if it had no handler at import, as with pytest 9.0.
logging.getLogger("lightning.pytorch").propagate = True


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let one process run what shares a fixture of its module: else each that runs tests makes it for itself."""
    fixtures = [fixture for found in item._fixtureinfo.name2fixturedefs.values() for fixture in found]
    if any(fixture.scope == "module" for fixture in fixtures):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def settings() -> dict[str, Any]:
    """What tests of one process share: who deals with a signal, and what Lightning's loggers leave out."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    found: dict[str, Any] = {f"handler of {number.name}": signal.getsignal(number) for number in numbers}
    found["blocked signals"] = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("lightning") and isinstance(logger, logging.Logger):
            found[f"logger {name}"] = (logger.level, logger.disabled, logger.propagate, [*logger.filters])
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the test that leaks, not the one that suffers from it."""
    before, variables, rank = children(), dict(os.environ), getattr(rank_zero_only, "rank", 0)
    set_before = settings()
    yield
    set_now = settings()
    altered = [name for name, value in set_before.items() if set_now[name] != value]
    left_rank, rank_zero_only.rank = getattr(rank_zero_only, "rank", 0), rank
    changed = {name for name in os.environ.keys() | variables if os.environ.get(name) != variables.get(name)}
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        os.environ.pop(name, None)
        if name in variables:
            os.environ[name] = variables[name]
    assert changed <= EXPECTED, f"environment variables left behind: {changed - EXPECTED}"
    assert not dist.is_initialized(), "a process group is left behind"
    deadline = time.monotonic() + _FAREWELL_S
    while (left := children() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    named = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in left if psutil.pid_exists(pid)}
    assert not left, f"processes are left running: {named}"
    assert not altered, f"left as the test has set them: {altered}"
    assert left_rank == rank, f"later tests would take this process for rank {left_rank}"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a training of five steps, which no test changes."""
    run = tmp_path_factory.mktemp("trained") / "run"
    run_here("fit", *TINY, f"--run_dir={run}")
    return run


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs a package, with what it needs and this environment lacks, into a folder of its own."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]

    @cache
    def into(package: str) -> Path:
        folder = tmp_path_factory.mktemp(package)
        if find_spec(package):
            return folder
        asked = subprocess.run([*pip, "--dry-run", "--report", "-", package], capture_output=True, text=True)
        if asked.returncode:
            pytest.skip(f"{package} is not installed, and pip cannot install it")
        packages = [each["metadata"] for each in json.loads(asked.stdout)["install"]]
        lacks = [f"{each['name']}=={each['version']}" for each in packages]
        subprocess.run([*pip, "--no-deps", f"--target={folder}", *lacks], check=True)
        return folder

    return into


@pytest.fixture
def one_process() -> Iterator[None]:
    """For a mode with processes in this one: its strategy makes a process group, and Lightning leaves that."""
    with mock.patch.dict(os.environ):
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
