"""Processes that a test has caused, and how to find those that it must not leave."""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import psutil

from lit_cifar.launch.forked import _servers

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let processes whose own parent dies become children of this one, where they are found."""
    assert Path(f"/proc/self/task/{os.getpid()}/children").exists(), "the kernel has no CONFIG_PROC_CHILDREN"
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Running processes below this one, without those that others keep for good."""
    found = set()
    for pid in _below(os.getpid()):
        try:
            process = psutil.Process(pid)
            if is_running(process) and not _is_kept(process):
                found.add(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def _below(pid: int) -> Iterator[int]:
    """Linux lists the children of each thread. psutil would read all processes of the machine, for every test twice."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            for child in map(int, file.read_text().split()):
                yield child
                yield from _below(child)


def _is_kept(process: psutil.Process) -> bool:
    """Whether it is kept for good.

    By multiprocessing: processes from which others are forked, and one that tidies up. By Open MPI its daemon, where
    mpi4py is installed: Lightning imports it to find out whether a run was started by MPI.
    """
    servers, command = [forkserver._forkserver, *_servers.values()], " ".join(process.cmdline())
    kept = process.pid in [server._forkserver_pid for server in servers]
    return kept or "multiprocessing.resource_tracker" in command or command.startswith("orted ")


def marked(folder: Path) -> list[psutil.Process]:
    """Running processes whose temporary files or output lie in `folder`, whoever has started them."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = [process.environ().get("TMPDIR", ""), *(file.path for file in process.open_files())]
            if any(path.startswith(str(folder)) for path in mine) and is_running(process) and not _is_kept(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_running(process: psutil.Process) -> bool:
    """Whether it is there and not a zombie."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], *, limit_s: float, poll_s: float = 0.002) -> bool:
    """Whether the condition holds within `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True
