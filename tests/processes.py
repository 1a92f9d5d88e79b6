"""Processes that a test has caused, and how to find those that it must not leave."""

import ctypes
import sys
from multiprocessing import forkserver
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let processes whose own parent dies become children of this one, where they are found; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Running processes below this one, without the two that multiprocessing keeps for good."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.pid == forkserver._forkserver._forkserver_pid:
                continue
            if is_running(process) and "resource_tracker" not in " ".join(process.cmdline()):
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def marked(folder: Path) -> list[psutil.Process]:
    """Running processes whose temporary files lie in `folder`, whoever has started them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR", "").startswith(str(folder)) and is_running(process):
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
