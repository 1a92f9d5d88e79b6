"""Processes that may hang, and are killed."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from lit_cifar.copy_probe.copy_fault import Kind
from lit_cifar.launch.forked import start_forked

START_S = 300.0
"""How long a process may take for its imports, and for a context on each device."""


class ProbeError(RuntimeError):
    """The copies could not be probed; nothing is known of them."""


@dataclass(frozen=True)
class Ended:
    """Why nothing more comes from a process; without a kind if that says nothing about the copies."""

    kind: Kind | None
    detail: str


@contextmanager
def worker(target: Callable[..., None], *args: object) -> Iterator[Connection]:
    """A process that runs `target(*args, connection)`, and the other end of the connection; it is killed at the end."""
    connection, theirs = Pipe()
    process = start_forked(_run, (target, *args, theirs))
    theirs.close()
    try:
        yield connection
    finally:
        process.kill()
        process.join()
        connection.close()


def _run(target: Callable[..., None], *args: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller too, which ends this process
    torch.set_num_threads(1)
    target(*args)


def received(connection: Connection, limit_s: float) -> Any:
    """What the process sends next; `Ended` if that is nothing within `limit_s` seconds."""
    if not connection.poll(max(0.0, limit_s)):
        return Ended("hung", "it did not end within the time limit")
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return Ended("failed", "its process ended")


def reason(error: Exception) -> Ended:
    """What to send of an error of a device: these are of many types, and all later calls to the device fail too."""
    detail = " ".join(str(error).split())[:300]
    return Ended(None if isinstance(error, torch.OutOfMemoryError) else "failed", detail)
